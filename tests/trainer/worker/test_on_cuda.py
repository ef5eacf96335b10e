"""Weights on GPUs, where there are any: the stream, shared memory and NCCL themselves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl import cuda_memory
from streamrl.device import SideStream
from streamrl.errors import PublicationError
from streamrl.trainer.worker.weight_files import WeightMemory
from streamrl.transport.collective import broadcasts, destroy_group, form_group, open_store
from tests.devices import needs_nccl_ranks, rank_device
from tests.forked import Forked
from tests.weights import FixedWeights

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
DEADLINE = 5.0
FORMING = 60.0


def test_a_side_stream_reads_what_the_computation_was_given_to_do_before() -> None:
    device = torch.device("cuda", 0)
    numbers = torch.zeros(2**20, device=device)
    torch.cuda._sleep(10**8)
    numbers += 8
    with SideStream(device).after_computation():
        read = numbers.clone()
        assert torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
    assert bool((read == 8).all())


def _open(folder: Path, answers: Any) -> None:
    torch.cuda.set_device(0)
    content = cuda_memory.read(folder)
    storage = cuda_memory.open_shared(content.handle)
    answers.send({name: weight.cpu().tolist() for name, weight in content.views(storage)})


def test_another_process_reads_the_weights_where_they_lie(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    carrier = WeightMemory(dtype=torch.float32, device=device, checksum=True, root=tmp_path)
    weights = {"a": torch.arange(6.0, device=device).view(2, 3), "b": torch.ones(1000, device=device)}
    carrier.prepare(1, FixedWeights(weights))
    with Forked(_open, [(Path(carrier.announce().folder),)]) as others:
        (found,) = others.take(1, seconds=FORMING)
        assert found == {name: weight.tolist() for name, weight in weights.items()}
        others.end(seconds=FORMING)
    carrier.close()


def _receive_one(port: int, answers: Any) -> None:
    device = rank_device(1)
    torch.cuda.set_device(device)
    group = _form(port, rank=1)
    tensor = torch.zeros(4, device=device)
    for _ in broadcasts([("a", tensor)], group, watched_seconds=FORMING):
        answers.send(tensor.tolist())
    time.sleep(FORMING)  # it is killed here, and never receives the second one


def _form(port: int, *, rank: int, store: Any = None) -> Any:
    return form_group(
        address="127.0.0.1", port=port, rank=rank, world_size=2, name="g", backend="nccl", timeout=FORMING, store=store
    )


@needs_nccl_ranks(2)
def test_a_peer_that_is_killed_in_the_middle_is_noticed_and_this_process_lives_on() -> None:
    torch.cuda.set_device(0)
    store = open_store("127.0.0.1")
    with Forked(_receive_one, [(store.port,)]) as others:
        group = _form(store.port, rank=0, store=store)
        tensor = torch.ones(4, device="cuda:0")
        for _ in broadcasts([("a", tensor)], group, watched_seconds=FORMING):
            pass
        assert others.take(1, seconds=FORMING) == [[1.0] * 4]
    began = time.monotonic()
    large = torch.ones(2**28, device="cuda:0")
    with pytest.raises(PublicationError, match="broadcast of b failed"):
        for _ in broadcasts([("b", large)], group, watched_seconds=DEADLINE):
            pass
    assert time.monotonic() - began < 10 * DEADLINE
    destroy_group(group)
    assert float(tensor.sum()) == 4.0, "the device goes on"
