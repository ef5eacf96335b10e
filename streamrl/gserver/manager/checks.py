"""Checks of a gserver's weight version before it is given groups: on joining, after silence, after a failure.

Invariant: at most one check of a gserver is in progress. A gserver that does not reply is suspect; its next heartbeat
starts the next check.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from streamrl import essential
from streamrl.errors import StreamRLError
from streamrl.gserver.manager.gserver import Gserver, serves
from streamrl.gserver.manager.registry import MemberEvent, MemberState
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.ledger import Ledger
from streamrl.waits import ANSWER_SECONDS, cancel

log = logging.getLogger(__name__)


class GserverChecks:
    """Requests the abilities and the weight version of gservers, and compares the version with the ledger's. Calls
    `on_checked` after every check."""

    def __init__(
        self,
        *,
        calls: WeightCalls,
        ledger: Ledger,
        on_checked: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._ledger = ledger
        self._on_checked = on_checked
        self._running: dict[Gserver, asyncio.Task[None]] = {}

    def start(self, gserver: Gserver) -> asyncio.Task[None]:
        """Start a check of `gserver`, unless one is in progress; return its task."""
        task = self._running.get(gserver)
        if task is None:
            task = essential.begin(self._check(gserver), name=f"check of {gserver.name}")
            self._running[gserver] = task
            task.add_done_callback(lambda _: self._running.pop(gserver, None))
        return task

    async def close(self) -> None:
        """End the checks in progress."""
        await cancel(*self._running.values())

    async def _check(self, gserver: Gserver) -> None:
        try:
            gserver.info = await self._calls.info(gserver)
            if gserver.state is MemberState.SUSPECT:
                await self._calls.resume(gserver, timeout=ANSWER_SECONDS)
            label = await self._calls.label(gserver)
        except StreamRLError as error:
            log.warning("%s takes no groups until it replies: %s", gserver.name, error)
            gserver.handle(MemberEvent.UNREACHABLE)
        else:
            self._found(gserver, label)
        self._on_checked()

    def _found(self, gserver: Gserver, label: str) -> None:
        """Compare `label`, by which `gserver` labels its weights, with the current version, and update its state."""
        unchecked = gserver.state in (MemberState.UNCHECKED, MemberState.SUSPECT)
        wanted = self._ledger.lineage.label(self._ledger.policy_version)
        if serves(label, wanted):
            gserver.handle(MemberEvent.FOUND_CURRENT)
            if unchecked:
                log.info("%s at %s takes groups", gserver.name, gserver.address)
        else:
            gserver.handle(MemberEvent.FOUND_OUTDATED)
            if unchecked:
                log.info(
                    "%s serves weights %r instead of %r: it takes groups once it has them",
                    *(gserver.name, label, wanted),
                )
