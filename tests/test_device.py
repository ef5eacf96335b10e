"""Which device a process computes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from streamrl.device import SideStream, attend_without_plans, resolve_device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    return 5


def test_processes_take_turns(gpus: int) -> None:
    assert [resolve_device("auto", index=index).index for index in range(7)] == [0, 1, 2, 3, 4, 0, 1]
    assert [resolve_device("cuda", index=index, each=2).index for index in range(4)] == [0, 2, 0, 2]
    assert resolve_device("auto", index=3, each=gpus).index == 0
    assert resolve_device("cpu", index=3, each=9) == torch.device("cpu")


class Cuda:
    """Stands in for `torch.cuda`: notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def Stream(self, device: torch.device) -> CudaStream:
        return CudaStream(self, "side")

    def default_stream(self, device: torch.device) -> CudaStream:
        return CudaStream(self, "default")

    @contextmanager
    def stream(self, stream: CudaStream) -> Iterator[None]:
        self.asked.append(f"enter {stream.name}")
        yield
        self.asked.append(f"leave {stream.name}")


class CudaStream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.name = name
        self._cuda = cuda

    def record_event(self) -> CudaStream:
        self._cuda.asked.append(f"record {self.name}")
        return self

    def wait_event(self, event: CudaStream) -> None:
        self._cuda.asked.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self._cuda.asked.append(f"this thread waits for {self.name}")


def test_a_side_stream_waits_for_what_was_computed_and_the_computation_for_nothing() -> None:
    cuda = Cuda()
    side = SideStream(torch.device("cuda", 0), cuda=cuda)
    with side.after_computation():
        cuda.asked.append("read")
    assert cuda.asked == [
        *("record default", "side waits for default", "enter side", "read", "leave side"),
        *("record side", "this thread waits for side"),
    ]


def test_attention_on_gpus_makes_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []
    monkeypatch.setattr("torch.backends.cuda.enable_cudnn_sdp", allowed.append)
    attend_without_plans(torch.device("cpu"))
    assert not allowed
    attend_without_plans(torch.device("cuda", 0))
    assert allowed == [False]
