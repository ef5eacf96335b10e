"""The master's view of the groups that its model workers hold: metadata and readiness, no tensors.

Each group is read once by each MFC: arrivals by `take_arrivals`, the training batch by
`take_batch`, oldest first. Waiting is event-driven: whoever changes the buffer wakes the waiters.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from streamrl.ledger import Selection
from streamrl.trainer.graph import STREAM_KEYS, Graph
from streamrl.types import SampleMeta

log = logging.getLogger(__name__)


class SequenceBuffer:
    """Groups by sequence number, with the keys that each one has."""

    def __init__(self, graph: Graph, *, wait_warning_seconds: float) -> None:
        self._graph = graph
        self._warning_seconds = wait_warning_seconds
        self._metas: dict[int, SampleMeta] = {}
        self._keys: dict[int, set[str]] = {}
        self._read: dict[str, set[int]] = {mfc.name: set() for mfc in graph.reading("arrivals")}
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._metas)

    async def put_batch(self, metas: Iterable[SampleMeta]) -> None:
        """Groups arrived."""
        async with self._changed:
            for meta in metas:
                self._metas[meta.seq] = meta
                self._keys[meta.seq] = set(STREAM_KEYS)
            self._changed.notify_all()

    async def amend_batch(self, seqs: Iterable[int], keys: Iterable[str]) -> None:
        """An MFC gave `keys` for groups; those discarded meanwhile are passed over."""
        async with self._changed:
            for seq in seqs:
                if seq in self._keys:
                    self._keys[seq].update(keys)
            self._changed.notify_all()

    async def discard(self, seqs: Iterable[int]) -> None:
        """Groups left the buffer: dropped, or trained on."""
        async with self._changed:
            for seq in seqs:
                del self._metas[seq], self._keys[seq]
                for read in self._read.values():
                    read.discard(seq)
            self._changed.notify_all()

    async def wake(self) -> None:
        """Something outside the buffer that waiters look at has changed."""
        async with self._changed:
            self._changed.notify_all()

    async def take_arrivals(self, mfc: str, inputs: frozenset[str], *, limit: int) -> list[SampleMeta]:
        """Up to `limit` groups that `mfc` has not read and whose inputs are there, oldest first."""
        read = self._read[mfc]

        def ready() -> list[int]:
            return [seq for seq in sorted(self._metas) if seq not in read and inputs <= self._keys[seq]]

        async with self._changed:
            await self._changed.wait_for(ready)
            seqs = ready()[:limit]
            read.update(seqs)
            return [self._metas[seq] for seq in seqs]

    async def take_batch(
        self, select: Callable[[dict[int, SampleMeta]], Selection], describe: Callable[[Selection], str]
    ) -> tuple[list[SampleMeta], list[SampleMeta]]:
        """The next training batch, and groups to drop; waits until there is one of the two.

        Taken groups stay in the buffer until `discard`. A wait past the warning time is logged
        as `describe` words it.
        """
        needed = self._graph.arrival_keys
        began = time.monotonic()
        async with self._changed:
            while True:
                complete = {seq: meta for seq, meta in self._metas.items() if needed <= self._keys[seq]}
                selection = select(complete)
                if selection.batch or selection.drop:
                    return self._pick(selection.batch), self._pick(selection.drop)
                try:
                    async with asyncio.timeout(self._warning_seconds):
                        await self._changed.wait()
                except TimeoutError:
                    log.warning("%s, for %.0f s now", describe(selection), time.monotonic() - began)

    def _pick(self, seqs: Sequence[int]) -> list[SampleMeta]:
        return [self._metas[seq] for seq in seqs]
