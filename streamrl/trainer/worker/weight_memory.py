"""Weights for gservers on the same GPU: two alternating sets, in memory that is shared by CUDA IPC.

A gserver copies a set when it stages it. Invariant: the set of the served version is not written to; the set of the
version before it is.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from streamrl import cuda_memory
from streamrl.checksum import LineSums, checksums, copy_and_sum
from streamrl.cuda_memory import Share, SharedWeights, WeightPlace
from streamrl.device import SideStream
from streamrl.machine import SHARED_MEMORY, machine_identity
from streamrl.trainer.worker.weight_files import claim, folder_in_memory
from streamrl.trainer.worker.weight_source import Weights
from streamrl.transport.control import PublishBeginReply, Snapshot

SETS = 2


class WeightMemory:
    """A `Carrier` (`publisher.py`)."""

    reads_once = True

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        checksum: bool,
        gpu: str = "",
        share: Share = cuda_memory.share,
        root: Path = SHARED_MEMORY,
    ) -> None:
        """`gpu`: identity of `device`, as in `Register`. `share` makes the handle of memory on it. The files that
        announce the memory to gservers are below `root`."""
        self.dtype = dtype
        self.sent_bytes = 0
        self._device = device
        self._gpu = gpu
        self._checksum = checksum
        self._share = share
        self._folder = folder_in_memory("cuda", root=root)
        self._lock = claim(self._folder)
        self._sets: list[tuple[SharedWeights, dict[str, Tensor]]] = []
        """Two: the announced content, and the weights by name. They are made once, because torch keeps an entry and an
        event for every handle that it makes."""
        self._beside = SideStream(device)
        self._version = 0
        self._sums: dict[str, str] = {}

    def prepare(self, version: int, weights: Weights) -> None:
        """Copy `weights` to the next set in turn."""
        if version == self._version:
            return
        if not self._sets:
            places, size = cuda_memory.lay_out(dict(weights.specs()), self.dtype)
            self._sets = [self._new_set(places, size) for _ in range(SETS)]
        content, targets = self._sets[version % SETS]
        sums: dict[str, LineSums] = {}
        with self._beside.after_computation(), closing(weights.weights()) as found:
            for name, weight in found:
                if self._checksum:
                    sums[name] = copy_and_sum(targets[name], weight.detach())
                else:
                    targets[name].copy_(weight.detach())
                self.sent_bytes += targets[name].nbytes
            self._sums = checksums(sums)
        folder = self._folder_of(version)
        folder.mkdir(exist_ok=True)
        cuda_memory.write(folder, content)
        self._version = version

    def announce(self) -> Snapshot:
        return Snapshot(folder=str(self._folder_of(self._version)), machine=machine_identity(), gpu=self._gpu)

    def send(self, begin: PublishBeginReply) -> dict[str, str]:
        """Return the checksums; the weights are complete already."""
        return self._sums

    def abort(self) -> None:
        """Do nothing: a failed attempt leaves the set valid."""

    def close(self) -> None:
        """Free the memory."""
        self._sets.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _new_set(self, places: dict[str, WeightPlace], size: int) -> tuple[SharedWeights, dict[str, Tensor]]:
        """Allocate a set of `size` bytes."""
        storage = torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()
        content = SharedWeights(self._share(storage), places)
        return content, dict(content.views(storage))

    def _folder_of(self, version: int) -> Path:
        return self._folder / f"v{version % SETS}"
