"""Tells the manager how much of each group is in flight, so that it gives a place on a gserver away as it frees up.

Owns what the manager has not heard yet. Invariant: what is told is the latest count of a group, never a difference,
so that a message that is lost or comes twice does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.groups import GroupInFlight, InFlight

BATCH_SECONDS = 0.02
"""Changes of so long go into one message."""


class InFlightReports:
    """Of one worker."""

    def __init__(self, control: ControlClient, *, worker: int) -> None:
        self._control = control
        self._worker = worker
        self._untold: dict[int, GroupInFlight] = {}
        self._news = asyncio.Event()

    def tell(self, group: GroupInFlight) -> None:
        """`group` replaces what was told of it before."""
        self._untold[group.seq] = group
        self._news.set()

    def forget(self, seq: int) -> None:
        """The group has ended, which the manager learns from others."""
        self._untold.pop(seq, None)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            await asyncio.sleep(BATCH_SECONDS)
            self._news.clear()
            changes, self._untold = self._untold, {}
            if not changes:
                continue
            await self._control.in_flight(InFlight(worker=self._worker, groups=list(changes.values())))


class RequestCount:
    """Requests of one group: those that run, and those that its siblings have not begun yet."""

    def __init__(self, seq: int, *, siblings: int, reports: InFlightReports) -> None:
        self._seq = seq
        self._to_begin = siblings
        self._running = 0
        self._tokens = 0
        self._reports = reports

    @contextmanager
    def request(self, tokens: int) -> Iterator[None]:
        """A request with a context of so many `tokens` is in flight."""
        self._to_begin = max(0, self._to_begin - 1)
        self._change(1, tokens)
        try:
            yield
        finally:
            self._change(-1, -tokens)

    def _change(self, requests: int, tokens: int) -> None:
        self._running += requests
        self._tokens += tokens
        self._reports.tell(GroupInFlight(self._seq, self._to_begin + self._running, self._tokens))
