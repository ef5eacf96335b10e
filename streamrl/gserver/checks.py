"""Finds out what a gserver serves before it is given groups: on joining, after silence, after a failure.

Invariant: at most one check of a gserver goes on; a gserver that does not answer stays unchecked,
and its next heartbeat brings the next check.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from streamrl import essential
from streamrl.errors import StreamRLError
from streamrl.gserver.routing import Gserver, Standing, serves
from streamrl.gserver.weight_calls import PROBE_SECONDS, WeightCalls

log = logging.getLogger(__name__)


class GserverChecks:
    """Moves gservers from unchecked to serving or evicted. `version` tells the current policy version."""

    def __init__(
        self,
        *,
        calls: WeightCalls,
        version: Callable[[], int],
        on_checked: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._version = version
        self._on_checked = on_checked
        self._running: dict[Gserver, asyncio.Task[None]] = {}

    def start(self, gserver: Gserver) -> asyncio.Task[None]:
        """Check `gserver`; the task is the one in progress if there is one."""
        task = self._running.get(gserver)
        if task is None:
            task = essential.begin(self._check(gserver), name=f"check of {gserver.name}")
            self._running[gserver] = task
            task.add_done_callback(lambda _: self._running.pop(gserver, None))
        return task

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check(self, gserver: Gserver) -> None:
        try:
            gserver.info = await self._calls.info(gserver)
            if gserver.stuck:
                await self._calls.resume(gserver, timeout=PROBE_SECONDS)
                gserver.stuck = False
            label = await self._calls.label(gserver)
        except StreamRLError as error:
            log.warning("%s takes no groups until it answers: %s", gserver.name, error)
            if gserver.standing is Standing.SERVING:
                gserver.standing = Standing.UNCHECKED
        else:
            self._judge(gserver, label)
        self._on_checked()

    def _judge(self, gserver: Gserver, label: str) -> None:
        if gserver.standing not in (Standing.UNCHECKED, Standing.SERVING):
            return
        if serves(label, self._version()):
            if gserver.standing is Standing.UNCHECKED:
                log.info("%s at %s takes groups", gserver.name, gserver.address)
            gserver.standing = Standing.SERVING
        elif gserver.standing is Standing.UNCHECKED:
            gserver.standing = Standing.EVICTED
            gserver.forgive()
            log.info(
                "%s serves weights %r instead of %d: it takes groups once it has them",
                gserver.name,
                label,
                self._version(),
            )
