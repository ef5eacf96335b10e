"""Weights in memory that is shared by handle. On a CPU a table stands in for what CUDA does between processes."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import UntypedStorage

from streamrl.checksum import tensor_sums
from streamrl.cuda_memory import Handle, OpenWeights, SharedWeights, WeightPlace
from streamrl.errors import ModelError
from streamrl.gserver.server.receiver import ExpectedWeights, WeightReceiver
from streamrl.trainer.worker.weight_files import WeightMemory
from streamrl.transport.control import PublishBeginReply
from tests.trainer.waiting import waits
from tests.trainer.worker.kept import Kept
from tests.weights import FixedWeights

WEIGHTS = {"a": torch.randn(7, 5), "b": torch.randn(3), "c": torch.full((1,), float("nan"))}
CPU = torch.device("cpu")
BEGIN = PublishBeginReply(group_name="", world_size=2)


class StandIn:
    """Gives out handles, and opens them: in one process, and without a GPU."""

    def __init__(self) -> None:
        self._memory: dict[bytes, UntypedStorage] = {}
        self.shared = self.opened = 0
        self.closed = threading.Semaphore(0)
        """Released once for each storage that was opened and is closed."""

    def share(self, storage: UntypedStorage) -> Handle:
        self.shared += 1
        name = str(storage.data_ptr()).encode()
        self._memory[name] = storage
        return Handle("GPU-1", name, storage.nbytes(), 0, b"", 0, b"", False)

    def open(self, handle: Handle) -> UntypedStorage:
        self.opened += 1
        array = torch.empty(0, dtype=torch.uint8).set_(self._memory[handle.memory]).numpy()
        weakref.finalize(array, self.closed.release)
        return torch.from_numpy(array).untyped_storage()


async def test_a_gserver_stages_what_lies_in_shared_memory(tmp_path: Path) -> None:
    gpu = StandIn()
    carrier = WeightMemory(dtype=torch.bfloat16, device=CPU, checksum=True, share=gpu.share, root=tmp_path)
    kept = Kept()
    receiver = WeightReceiver(
        expected=ExpectedWeights({name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}, torch.bfloat16),
        aside=kept,
        device=CPU,
        timeout=10.0,
        open_shared=gpu.open,
    )
    folders = []
    for version in (1, 2, 3):
        weights = {name: tensor * version for name, tensor in WEIGHTS.items()}
        with waits(CPU) as found:
            carrier.prepare(version, FixedWeights(weights))
            folders.append(carrier.announce().folder)
            await receiver.begin()
            await receiver.load(Path(folders[-1]), str(version))
        assert found.count("cpu") == 2, "each side reads the sums of all weights with one copy"
        expected = {name: tensor.bfloat16() for name, tensor in weights.items()}
        sums = {name: tensor_sums(tensor) for name, tensor in expected.items()}
        assert await receiver.staged_sums() == carrier.send(BEGIN) == sums
        for name, tensor in expected.items():
            assert torch.equal(kept.tensors[name].view(torch.int16), tensor.view(torch.int16))
        await receiver.take()
    assert folders[0] == folders[2] != folders[1], "the version that is served is not written over"
    assert gpu.shared == 2, "once for each set: torch keeps an event for each handle that it makes"
    assert gpu.opened == 2, "the memory of each set stays open"
    carrier.close()
    assert [path for path in folders if Path(path).exists()] == []  # noqa: ASYNC240


@pytest.mark.parametrize("ends", ["closes", "is killed", "is followed by another"])
def test_memory_is_closed_when_its_owner(ends: str, tmp_path: Path) -> None:
    gpu = StandIn()
    opened = OpenWeights(gpu.open)
    owner, other = (
        WeightMemory(dtype=torch.float32, device=CPU, checksum=False, share=gpu.share, root=tmp_path) for _ in range(2)
    )
    for version in (1, 2):
        for carrier in (owner, other):
            carrier.prepare(version, FixedWeights(WEIGHTS))
        found = opened.read(Path(owner.announce().folder))
    assert torch.equal(found["a"], WEIGHTS["a"])
    del found
    assert not gpu.closed.acquire(blocking=False)
    if ends == "closes":
        owner.close()
    elif ends == "is killed":
        owner._lock.close()
    else:
        opened.read(Path(other.announce().folder))
    assert all(gpu.closed.acquire(timeout=10) for _ in range(2)), "one for each set"
    assert torch.equal(opened.read(Path(other.announce().folder))["b"], WEIGHTS["b"])
    other.close()
    owner.close()


@pytest.mark.parametrize(
    "place",
    [
        WeightPlace(0, (9999,), "float32"),
        WeightPlace(-256, (1,), "float32"),
        WeightPlace(4, (1,), "float32"),
        WeightPlace(0, (1,), "x"),
    ],
)
def test_a_weight_that_does_not_lie_in_the_memory_is_refused(place: WeightPlace) -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    content = SharedWeights(StandIn().share(memory.untyped_storage()), {"a": place})
    with pytest.raises(ModelError, match=r"a .* does not lie in shared memory of 1024 bytes"):
        list(content.views(memory.untyped_storage()))


def test_folders_in_shared_memory_go_with_their_owner_or_with_the_next_run(tmp_path: Path) -> None:
    def memory() -> WeightMemory:
        return WeightMemory(dtype=torch.float32, device=CPU, checksum=False, share=StandIn().share, root=tmp_path)

    def folders() -> set[Path]:
        return set(tmp_path.iterdir())

    old, young, used = (tmp_path / f"streamrl-cuda-{name}" for name in ("old", "young", "used"))
    for folder in (old, young, used):
        folder.mkdir()
    (used / "v1").mkdir()
    for folder in (old, used):
        os.utime(folder, (1, 1))
    living = memory()
    assert old not in folders(), "it was empty, and nobody's for hours"
    assert {young, used} < folders()
    (mine,) = folders() - {young, used}
    dead = memory()
    (left,) = folders() - {young, used, mine}
    dead._lock.close()  # as by a kill
    third = memory()
    assert left not in folders()
    assert mine in folders(), "its run lives"
    living.close()
    third.close()
    assert folders() == {young, used}
