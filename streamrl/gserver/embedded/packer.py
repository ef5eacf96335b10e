"""Packs matrices one after another, in a thread of its own, while others compute.

The thread has as many helpers as the one that computes: MKL's products are slower from a pack made with fewer.
It ends with the last matrix, and its helpers with it, because idle ones would slow down those of other threads (see
`device.compute_with`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from streamrl.device import compute_with
from streamrl.gserver.embedded.linear import Matrix
from streamrl.gserver.embedded.packing import packing_for

log = logging.getLogger(__name__)


class Packer:
    """Called by one thread at a time."""

    def __init__(self, *, threads: int, deterministic: bool = False) -> None:
        """`deterministic`: see `packing_for`."""
        self._threads = threads
        self._deterministic = deterministic
        self._packing: dict[Matrix, Future[None]] = {}
        self._failed = False
        """One of the last that were started could not be packed."""

    def start(self, matrices: Iterable[Matrix]) -> None:
        """Pack those of `matrices` soon that are not packed."""
        missing = [matrix for matrix in matrices if not matrix.packed and matrix not in self._packing]
        if not missing:
            return
        self._failed = False
        pool = ThreadPoolExecutor(1, "packing", initializer=compute_with, initargs=(self._threads,))
        self._packing |= {matrix: pool.submit(self._pack, matrix) for matrix in missing}
        pool.shutdown(wait=False)

    def unpack(self, matrix: Matrix) -> None:
        """Nobody reads the weights of `matrix` any more, and its packed copy is gone."""
        packing = self._packing.pop(matrix, None)
        if packing is not None and not packing.cancel():
            packing.result()
        matrix.unpack()

    def finish(self) -> None:
        """Until all is packed that was started."""
        for packing in self._packing.values():
            packing.result()
        self._packing.clear()

    def stop(self) -> None:
        """Pack nothing more than what is being packed now."""
        self._packing = {matrix: packing for matrix, packing in self._packing.items() if not packing.cancel()}

    def _pack(self, matrix: Matrix) -> None:
        try:
            if self._failed:
                return
            packing = packing_for(matrix.weight.dtype, self._threads, deterministic=self._deterministic)
            if packing is not None:
                matrix.pack(packing)
        except RuntimeError as error:  # most likely there is no memory left, for the others neither
            self._failed = True
            log.warning("matrices of these weights are not packed, so products are slower: %s", error)
