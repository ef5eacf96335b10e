"""Finds out what a gserver serves before it is given groups: on joining, after silence, after a failure.

Invariant: at most one check of a gserver goes on; a gserver that does not answer stays unchecked,
and its next heartbeat brings the next check.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from streamrl.errors import StreamRLError
from streamrl.gserver.routing import Gserver, Standing, serves
from streamrl.transport.generation import Empty, GenerationClient, ModelInfo, Outcome, ServerInfo

log = logging.getLogger(__name__)


class GserverChecks:
    """Moves gservers from unchecked to serving or evicted. `version` tells the current policy version."""

    def __init__(
        self,
        *,
        client: GenerationClient,
        version: Callable[[], int],
        on_checked: Callable[[], None],
        timeout: float,
    ) -> None:
        self._client = client
        self._version = version
        self._on_checked = on_checked
        self._timeout = timeout
        self._running: dict[Gserver, asyncio.Task[None]] = {}

    def start(self, gserver: Gserver) -> asyncio.Task[None]:
        """Check `gserver`; the task is the one in progress if there is one."""
        task = self._running.get(gserver)
        if task is None:
            task = asyncio.create_task(self._check(gserver), name=f"check of {gserver.name}")
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
            gserver.info = await self._client.get(gserver.address, "/server_info", ServerInfo, timeout=self._timeout)
            if gserver.stuck:
                await self._client.post(
                    gserver.address, "/continue_generation", Empty(), Outcome, timeout=self._timeout
                )
                gserver.stuck = False
            model = await self._client.get(gserver.address, "/model_info", ModelInfo, timeout=self._timeout)
        except StreamRLError as error:
            log.warning("%s takes no groups until it answers: %s", gserver.name, error)
            if gserver.standing is Standing.SERVING:
                gserver.standing = Standing.UNCHECKED
        else:
            self._judge(gserver, model.weight_version)
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
            log.info(
                "%s serves weights %r instead of %d: it takes groups after the next update",
                gserver.name,
                label,
                self._version(),
            )
