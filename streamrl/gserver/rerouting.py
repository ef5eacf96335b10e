"""Finds a gserver for a request, also when the one that had it has failed.

Invariant: nobody is sent back to a failed gserver before it was asked how it is, unless there is another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streamrl.gserver.checks import GserverChecks
from streamrl.gserver.line import Line
from streamrl.gserver.routing import Fleet, Gserver


class Rerouting:
    """Those for whom there is no place now wait in `line`."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        checks: GserverChecks,
        line: Line[Gserver],
        long_poll_seconds: float,
    ) -> None:
        self._fleet = fleet
        self._checks = checks
        self._line = line
        self._long_poll = long_poll_seconds

    async def find(self, choose: Callable[[str], Gserver | None], *, failed: str) -> str:
        """URL of what `choose(avoid)` finds, with the URL to avoid, now or within a long poll; empty: nothing.

        `failed`: URL of the gserver that failed, which is checked; empty: none did.
        """
        suspect = self._fleet.serving_at(failed)
        check = self._checks.start(suspect) if suspect is not None else None
        choice = choose(failed)
        if choice is None:
            if check is not None:
                await asyncio.wait({check})
            choice = await self._line.find(lambda: choose(""), timeout=self._long_poll)
        return choice.address if choice is not None else ""
