"""What a trained role is besides its weights: gathered from all ranks, then written, at different times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from streamrl.trainer.backends.adamw import OPTIMIZER
from streamrl.trainer.backends.files import copies, write_tensors


class RoleState(msgspec.Struct, frozen=True):
    """On its way to a checkpoint."""

    optimizer: Iterable[tuple[str, Tensor]]
    """Whole tensors by name on rank 0, empty ones elsewhere; while they come one after another, collective."""
    files: Mapping[str, bytes]
    """Small facts, by the name of their file."""

    def copied(self, *, keep: bool) -> RoleState:
        """The same in host memory, which training leaves alone; only taken part in without `keep`. Collective."""
        return RoleState(copies(self.optimizer, keep=keep).items(), self.files)

    def write(self, folder: Path) -> None:
        """Into `folder`, which exists; for `load_state` of the role."""
        write_tensors(folder, OPTIMIZER, self.optimizer)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
