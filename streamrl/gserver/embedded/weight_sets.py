"""The two sets of weights: one that is served, and one that stands by, which updates are written to.

There is a second one from the first update on. Invariant: the live set is never written to; an exchange hands over a
set only when it is ready to be computed with.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor

from streamrl.gserver.embedded.architecture import Architecture
from streamrl.gserver.embedded.parameters import Parameters


class WeightSets:
    """Keeps `gserver.engine.WeightsAside`: it is written to in other threads than the engine's."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        dtype: torch.dtype,
        held_in: torch.dtype,
        device: torch.device,
        threads: int,
    ) -> None:
        """See `Parameters`."""
        self._architecture = architecture
        self._dtype = dtype
        self._held_in = held_in
        self._device = device
        self._threads = threads
        self.live = self._new()
        self._standby: Parameters | None = None
        self._making = threading.Lock()

    def store(self, name: str, tensor: Tensor) -> str:
        return self._standing_by().write(name, tensor)

    def make_ready(self) -> None:
        self._standing_by().make_ready()

    def load(self, folder: Path) -> None:
        """Write the checkpoint in `folder` to the set that stands by; raises `ModelError`."""
        self._standing_by().load(folder)

    def exchange(self) -> Parameters:
        """Serve the set that stands by; answers it."""
        self.make_ready()
        self.live, self._standby = self._standing_by(), self.live
        return self.live

    def _standing_by(self) -> Parameters:
        with self._making:
            if self._standby is None:
                self._standby = self._new()
            return self._standby

    def _new(self) -> Parameters:
        return Parameters(
            self._architecture,
            dtype=self._dtype,
            device=self._device,
            held_in=self._held_in,
            threads=self._threads,
        )
