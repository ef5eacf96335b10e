"""Which device a process computes on."""

from __future__ import annotations

import pytest
import torch

from streamrl.device import resolve_device
from streamrl.errors import ConfigError


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


def test_a_server_of_more_ranks_than_devices_is_refused(gpus: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel = 6 needs as many CUDA devices; torch finds {gpus}"):
        resolve_device("auto", each=6)
