"""Tells the manager which groups the trainer has: taken, or let go of as too old (`GroupChanges`).

Owns the count of both for each group (`ledger.Fate`). What is told of a group is its latest count, never a
difference, so a report that is lost is told again and one that comes twice does no harm. Invariant: that a group
was let go of is told only after all workers have let go of it, since from then on its prompt comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from streamrl.ledger import Fate
from streamrl.seqs import SeqSet
from streamrl.transport.control import GroupChanges
from streamrl.transport.manager_client import ControlClient


class ChangeLog:
    """Collects what happened and reports it, many groups at a time."""

    def __init__(self, client: ControlClient, *, trained: Iterable[int] = ()) -> None:
        """`trained`: groups that the run had trained on when it began, which the manager knows of."""
        self._client = client
        self._taken = SeqSet()
        self._drops: dict[int, int] = {}
        self._untold: set[int] = set()
        self._some = asyncio.Event()
        self._reported = asyncio.Condition()
        self._busy = False
        for seq in trained:
            self._taken.add(seq)

    def changes(self, seq: int) -> int:
        """How often the trainer took `seq` or let go of it."""
        return 2 * self._drops.get(seq, 0) + (seq in self._taken)

    def stored(self, seqs: Iterable[int]) -> None:
        """These groups are with the trainer."""
        for seq in seqs:
            self._taken.add(seq)
            self._tell(seq)

    @contextmanager
    def dropping(self, seqs: Collection[int]) -> Iterator[None]:
        """The trainer has these no more; all workers have let go of them when the context ends."""
        for seq in seqs:
            self._taken.discard(seq)
            self._drops[seq] = self._drops.get(seq, 0) + 1
            self._untold.discard(seq)
        yield
        for seq in seqs:
            self._tell(seq)

    def news(self) -> list[Fate]:
        """What has changed since this was asked last."""
        untold, self._untold = self._untold, set()
        return [Fate(seq, self.changes(seq)) for seq in sorted(untold)]

    async def report(self) -> None:
        """Report for ever."""
        while True:
            await self._some.wait()
            self._some.clear()
            self._busy = True
            await self._client.tell_groups(GroupChanges(self.news()))
            async with self._reported:
                self._busy = False
                self._reported.notify_all()

    async def flush(self) -> None:
        """Until everything has been reported."""
        async with self._reported:
            await self._reported.wait_for(lambda: not (self._busy or self._untold))

    def _tell(self, seq: int) -> None:
        self._untold.add(seq)
        self._some.set()
