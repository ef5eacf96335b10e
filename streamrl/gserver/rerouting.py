"""Finds a gserver for a request, also when the one that had it has failed.

Invariant: nobody is sent back to a failed gserver before it was asked how it is, unless there is another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streamrl.gserver.checks import GserverChecks
from streamrl.gserver.routing import Fleet, Gserver
from streamrl.gserver.wakeup import Wakeup


class Rerouting:
    """`over` tells whether the run is; then nothing is found."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        checks: GserverChecks,
        changed: Wakeup,
        over: Callable[[], bool],
        long_poll_seconds: float,
    ) -> None:
        self._fleet = fleet
        self._checks = checks
        self._changed = changed
        self._over = over
        self._long_poll = long_poll_seconds

    async def find(self, choose: Callable[[str], Gserver | None], *, failed: str) -> str:
        """URL of what `choose(avoid)` finds, with the URL to avoid, now or within a long poll; empty: nothing.

        `failed`: URL of the gserver that failed, which is checked; empty: none did.
        """
        suspect = next((g for g in self._fleet.serving() if g.address == failed), None)
        check = self._checks.start(suspect) if suspect is not None else None
        choice = choose(failed)
        if choice is None:
            if check is not None:
                await asyncio.wait({check})
            await self._changed.until(lambda: bool(self._fleet.serving()) or self._over(), timeout=self._long_poll)
            choice = choose("")
        return choice.address if choice is not None else ""
