"""Packs matrices one after another, in a thread of its own, while others are still written.

The thread has as many helpers as the one that computes: a pack made with fewer makes products up to twice as slow.
It ends with `finish`, and its helpers with it, because idle ones would slow down those of other threads (see
`device.compute_with`).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from streamrl.device import compute_with
from streamrl.gserver.embedded.linear import Matrix, packs_exactly


class Packer:
    """Called by one thread at a time."""

    def __init__(self, *, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._packing: dict[Matrix, Future[None]] = {}

    def start(self, matrix: Matrix) -> None:
        """Pack `matrix` soon, unless it is packed or about to be."""
        if matrix.packed or matrix in self._packing:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "packing", initializer=compute_with, initargs=(self._threads,))
        self._packing[matrix] = self._pool.submit(self._pack, matrix)

    def unpack(self, matrix: Matrix) -> None:
        """Nobody reads the weights of `matrix` any more, and its packed copy is gone."""
        packing = self._packing.pop(matrix, None)
        if packing is not None:
            packing.result()
        matrix.unpack()

    def finish(self) -> None:
        """Until all is packed that was started."""
        for packing in self._packing.values():
            packing.result()
        self._packing.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _pack(self, matrix: Matrix) -> None:
        if packs_exactly(self._threads):
            matrix.pack()
