"""The two sets of weights: one that is served, and one that stands by, which an update fills.

The one that stands by is memory of this process, which updates are written to, or is borrowed: weights that a
publisher on this host has put into shared memory are served from there. Invariant: the live set is never written to,
one that was borrowed, or lent to others, never at all.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from streamrl.checksum import tensor_sums
from streamrl.gserver.embedded.architecture import Architecture
from streamrl.gserver.embedded.parameters import Parameters


class WeightSets:
    """Keeps `gserver.engine.WeightsAside`: it is filled in other threads than the engine's."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        dtype: torch.dtype,
        held_in: torch.dtype,
        device: torch.device,
        threads: int,
        deterministic: bool = False,
    ) -> None:
        """See `Parameters`. `deterministic`: no product is made before all matrices are packed, so that equal requests
        get equal answers to the last bit; else a set is served at once, and packed meanwhile."""
        self._architecture = architecture
        self.dtype = dtype
        self._held_in = held_in
        self._device = device
        self._threads = threads
        self._deterministic = deterministic
        self.live = self._new()
        self._standby: Parameters | None = None
        self._retired: Parameters | None = None
        """What is not to be written to, and served no more."""
        self._making = threading.Lock()

    def start(self, folder: Path) -> None:
        """Serve the checkpoint in `folder`, which nobody computes with yet; raises `ModelError`."""
        self.live.load(folder)
        self.live.settle()
        self.live.pack()

    def store(self, name: str, tensor: Tensor) -> str:
        return self._writable().write(name, tensor)

    def place(self, name: str) -> Tensor | None:
        return self._writable().place(name) if self._held_in == self.dtype else None

    def sums(self, name: str) -> str:
        return tensor_sums(self._writable().named[name])

    def borrow(self, weights: Mapping[str, Tensor]) -> bool:
        if self._held_in != self.dtype or self._device.type != "cpu":
            return False
        with self._making:
            self._standby = self._new(borrowed=weights)
        return True

    def forget(self) -> None:
        with self._making:
            self._standby = None

    def make_ready(self) -> None:
        standby = self._standing_by()
        standby.settle()
        if self._deterministic:
            standby.pack()

    def load(self, folder: Path) -> None:
        """Write the checkpoint in `folder` to the set that stands by; raises `ModelError`."""
        self._writable().load(folder)

    def exchange(self) -> Parameters:
        """Serve the set that stands by; answers it. `let_go` comes next, when there is time."""
        self.make_ready()
        old, self.live = self.live, self._standing_by()
        old.stop_packing()
        self._standby, self._retired = (None, old) if old.read_only else (old, None)
        self.live.start_packing()
        return self.live

    def lend(self) -> Mapping[str, Tensor]:
        """What is served now, by name, for others to read as long as they like."""
        self.live.read_only = True
        return self.live.named

    def let_go(self) -> None:
        """Give back what is served no more; takes longer the larger it is."""
        self._retired = None

    def _writable(self) -> Parameters:
        """What stands by, or a new set in its place if others read it."""
        with self._making:
            if self._standby is None or self._standby.read_only:
                self._standby = self._new()
            return self._standby

    def _standing_by(self) -> Parameters:
        """What stands by, whoever has filled it."""
        with self._making:
            if self._standby is None:
                self._standby = self._new()
            return self._standby

    def _new(self, borrowed: Mapping[str, Tensor] | None = None) -> Parameters:
        return Parameters(
            self._architecture,
            dtype=self.dtype,
            device=self._device,
            held_in=self._held_in,
            threads=self._threads,
            deterministic=self._deterministic,
            borrowed=borrowed,
        )
