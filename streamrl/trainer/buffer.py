"""The master's view of the groups that its model workers hold: metadata and readiness, no tensors.

Each group is read once by each MFC: arrivals by `get_batch_for_rpc`, the training batch by
`take_batch`, oldest first. Waiting is event-driven: whoever changes the buffer wakes the waiters.
What is ready for whom is kept up to date as keys come, so nothing here looks through all groups.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from streamrl.held import HeldGroups, SeqQueue
from streamrl.ledger import Selection
from streamrl.trainer.graph import Graph
from streamrl.types import SampleMeta

log = logging.getLogger(__name__)

NO_KEYS: frozenset[str] = frozenset()


class Growth(NamedTuple):
    """What keys that are added to those that a group has make of it."""

    keys: frozenset[str]
    """All that it has now."""
    readable: tuple[str, ...]
    """MFCs whose inputs are complete only now."""
    completes: bool
    """Whether only now it can be part of a batch."""


class AsyncIOSequenceBuffer:
    """Groups by sequence number, with the keys that each one has."""

    def __init__(self, graph: Graph, *, wait_warning_seconds: float) -> None:
        self._warning_seconds = wait_warning_seconds
        self._inputs = {mfc.name: mfc.inputs for mfc in graph.reading("arrivals")}
        self._needed = graph.arrival_keys
        self._stream_keys = graph.stream_keys
        self._metas: dict[int, SampleMeta] = {}
        self._keys: dict[int, frozenset[str]] = {}
        self._unread = {mfc: SeqQueue() for mfc in self._inputs}
        self._complete = HeldGroups()
        self._growths: dict[tuple[frozenset[str], frozenset[str]], Growth] = {}
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._metas)

    def __contains__(self, seq: int) -> bool:
        return seq in self._metas

    async def put_batch(self, metas: Iterable[SampleMeta]) -> None:
        """Groups arrived. One that is held already takes the place of the old one, and is read again."""
        async with self._changed:
            for meta in metas:
                if meta.seq in self._metas:
                    self._forget(meta.seq)
                self._metas[meta.seq] = meta
                self._keys[meta.seq] = NO_KEYS
                self._grow(meta.seq, self._stream_keys)
            self._changed.notify_all()

    async def amend_batch(
        self, seqs: Iterable[int], keys: Iterable[str], *, rewards: Mapping[int, list[float]] | None = None
    ) -> None:
        """An MFC gave `keys` for groups; those discarded meanwhile are passed over.

        `rewards`: of each sibling, by sequence number, where the MFC gave those.
        """
        added = frozenset(keys)
        async with self._changed:
            for seq in seqs:
                if seq in self._keys:
                    if rewards and seq in rewards:
                        self._metas[seq] = msgspec.structs.replace(self._metas[seq], rewards=rewards[seq])
                    self._grow(seq, added)
            self._changed.notify_all()

    async def discard(self, seqs: Iterable[int]) -> None:
        """Groups left the buffer: dropped, or trained on."""
        async with self._changed:
            for seq in seqs:
                self._forget(seq)
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, which is looked at whenever something changes."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def wake(self) -> None:
        """Something outside the buffer that waiters look at has changed."""
        async with self._changed:
            self._changed.notify_all()

    async def get_batch_for_rpc(self, mfc: str, *, limit: int) -> list[SampleMeta]:
        """Up to `limit` groups that `mfc` has not read and whose inputs are there, oldest first; waits for one."""
        unread = self._unread[mfc]
        async with self._changed:
            await self._changed.wait_for(lambda: len(unread))
            return self._pick(unread.pop(limit))

    async def take_batch(
        self, select: Callable[[HeldGroups], Selection], describe: Callable[[Selection], str]
    ) -> tuple[list[SampleMeta], list[SampleMeta]]:
        """The next training batch, and groups to drop; waits until there is one of the two.

        `select` sees the groups that all MFCs that read arrivals are through with, and must not change
        them. Taken groups stay in the buffer until `discard`. A wait past the warning time is logged as
        `describe` words it.
        """
        began = time.monotonic()
        async with self._changed:
            while True:
                selection = select(self._complete)
                if selection.batch or selection.drop:
                    return self._pick(selection.batch), self._pick(selection.drop)
                try:
                    async with asyncio.timeout(self._warning_seconds):
                        await self._changed.wait()
                except TimeoutError:
                    log.warning("%s, for %.0f s now", describe(selection), time.monotonic() - began)

    def _pick(self, seqs: Sequence[int]) -> list[SampleMeta]:
        return [self._metas[seq] for seq in seqs]

    def _grow(self, seq: int, added: frozenset[str]) -> None:
        before = self._keys[seq]
        growth = self._growths.get((before, added)) or self._find_growth(before, added)
        self._keys[seq] = growth.keys
        for mfc in growth.readable:
            self._unread[mfc].add(seq)
        if growth.completes:
            self._complete[seq] = self._metas[seq]

    def _find_growth(self, before: frozenset[str], added: frozenset[str]) -> Growth:
        """All groups grow in the same few ways, so each way is worked out once."""
        keys = before | added
        growth = Growth(
            keys,
            readable=tuple(mfc for mfc, inputs in self._inputs.items() if inputs <= keys and not inputs <= before),
            completes=self._needed <= keys and not self._needed <= before,
        )
        self._growths[before, added] = growth
        return growth

    def _forget(self, seq: int) -> None:
        del self._metas[seq], self._keys[seq]
        for unread in self._unread.values():
            unread.discard(seq)
        self._complete.pop(seq, None)
