"""Tells the manager's ledger what became of groups: stored, or dropped as too old.

One reporter, in order: a group's drop never overtakes its storing, so the ledger never counts
a group that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.groups import Settle


class Settlement:
    """Collects what happened and reports it, many groups at a time."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._finished: list[int] = []
        self._dropped: list[int] = []
        self._some = asyncio.Event()
        self._reported = asyncio.Condition()
        self._busy = False

    def stored(self, seqs: Iterable[int]) -> None:
        """These groups are with the trainer."""
        self._finished.extend(seqs)
        self._some.set()

    def dropped(self, seqs: Iterable[int]) -> None:
        """These were, and are no more."""
        self._dropped.extend(seqs)
        self._some.set()

    async def report(self) -> None:
        """Report for ever."""
        while True:
            await self._some.wait()
            self._some.clear()
            finished, self._finished = self._finished, []
            dropped, self._dropped = self._dropped, []
            self._busy = True
            await self._client.settle(Settle(finished=finished, dropped=dropped))
            async with self._reported:
                self._busy = False
                self._reported.notify_all()

    async def flush(self) -> None:
        """Until everything has been reported."""
        async with self._reported:
            await self._reported.wait_for(lambda: not (self._busy or self._finished or self._dropped))
