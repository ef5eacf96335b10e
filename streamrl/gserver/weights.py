"""Weight publication on the manager's side: who takes part, in which group, one update at a time.

Owns the weight group and the update in progress (`weight_update.py` carries one through). The
publisher, rank 0 of the group, calls `begin`, broadcasts, and calls `commit`.

Invariant: at any time every gserver that is routed to serves the manager's policy version, except
within the moments of a swap.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from streamrl.config import WeightsConfig
from streamrl.errors import PublicationError, StreamRLError
from streamrl.gserver.routing import Fleet, Gserver
from streamrl.gserver.wakeup import Wakeup
from streamrl.gserver.weight_calls import WeightCalls
from streamrl.gserver.weight_update import Stage, UpdateRecord, WeightGroup, WeightUpdate
from streamrl.transport.control.publication import PublishBegin, PublishBeginReply, PublishCommit, PublishReply

log = logging.getLogger(__name__)


class WeightUpdates:
    """Answers the publisher. `on_version` hears a new version as soon as the first gserver serves it;
    `on_record` hears every attempt that has ended."""

    def __init__(
        self,
        *,
        config: WeightsConfig,
        fleet: Fleet,
        changed: Wakeup,
        calls: WeightCalls,
        on_version: Callable[[int], None],
        on_record: Callable[[UpdateRecord], None],
    ) -> None:
        self.version = 0
        self.completed = 0
        """Updates that took effect."""
        self.failed = 0
        """Attempts that were rolled back."""
        self.last: UpdateRecord | None = None
        """The latest attempt that has ended."""
        self._config = config
        self._fleet = fleet
        self._changed = changed
        self._calls = calls
        self._on_version = on_version
        self._on_record = on_record
        self._group: WeightGroup | None = None
        self._run_name = uuid.uuid4().hex[:8]  # a server that several runs join after another still has their groups
        self._group_numbers = itertools.count(1)
        self._update: WeightUpdate | None = None
        self._running: asyncio.Task[PublishReply] | None = None
        self._beginning = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._running is not None and not self._running.done()

    def status(self) -> dict[str, Any]:
        """State of the update in progress, and figures of the last one."""
        now = self._update.status() if self._update else {"state": Stage.IDLE.value}
        last = msgspec.to_builtins(self.last) if self.last else None
        return {**now, "completed": self.completed, "failed": self.failed, "last": last}

    async def begin(self, message: PublishBegin) -> PublishBeginReply:
        """Start an update and name its group; an update still in progress is rolled back first.

        Raises `PublicationError` when the version is not newer, or when no gserver answers within
        `weights.timeout_seconds`.
        """
        async with self._beginning:
            await self._settle_previous()
            if message.version <= self.version:
                raise PublicationError(
                    f"version {message.version} cannot be published: the gservers are at {self.version}"
                )
            members = await self._pick(message.version)
            group = self._group_of(members, message.group_name)
            self._update = WeightUpdate(
                message=message,
                old_version=self.version,
                group=group,
                calls=self._calls,
                config=self._config,
                on_swapped=self._swapped,
            )
            self._running = asyncio.create_task(self._run(self._update), name=f"weights v{message.version}")
            return PublishBeginReply(group_name=group.name, world_size=group.world_size)

    async def commit(self, message: PublishCommit) -> PublishReply:
        """The publisher's end of the update; answers how it went, the same however often it is asked."""
        update, running = self._update, self._running
        if (
            update is None
            or running is None
            or (update.version, update.group.name)
            != (
                message.version,
                message.group_name,
            )
        ):
            raise PublicationError(
                f"there is no update to version {message.version} in group {message.group_name!r}; begin it first"
            )
        update.commit(message.error)
        return await asyncio.shield(running)

    async def close(self) -> None:
        """Roll back what is in progress, resume everyone, and forget the group."""
        if self._update is not None and self._running is not None and not self._running.done():
            self._update.hurry()
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _settle_previous(self) -> None:
        if self._update is not None and self._running is not None and not self._running.done():
            self._update.abort("the publisher began another update")
            await asyncio.wait({self._running})

    async def _run(self, update: WeightUpdate) -> PublishReply:
        try:
            return await update.run()
        finally:
            record = self.last = update.record
            if record.done:
                self.completed += 1
                log.info("weights v%d served after a pause of %.3f s", record.version, record.pause_seconds)
            else:
                self.failed += 1
                update.group.broken = True
                self._destroy(update.group)
                log.warning("weights v%d rolled back: %s", record.version, record.error or "the manager leaves")
            if record.evicted:
                log.warning("weights v%d: evicted gservers %s until the next update", record.version, record.evicted)
            self._on_record(record)
            self._changed.notify()

    def _swapped(self, version: int) -> None:
        self.version = version
        if self._update is not None:
            self._fleet.updated(self._update.group.members)
        self._on_version(version)

    async def _pick(self, version: int) -> list[Gserver]:
        """The gservers that answer now; waits for one if there is none."""
        deadline = time.monotonic() + self._config.timeout_seconds
        seen = self._fleet.news
        while True:
            candidates = self._fleet.candidates(version)
            answered = await asyncio.gather(*(self._ask(g) for g in candidates))
            live = [g for g, lives in zip(candidates, answered, strict=True) if lives and self._fleet.is_member(g)]
            if live:
                return live
            log.warning("weights v%d wait for a gserver: none of %d answers", version, len(candidates))
            left = max(deadline - time.monotonic(), 0)
            if not await self._changed.until(partial(self._fleet.has_news_since, seen), timeout=left):
                raise PublicationError(
                    f"weights v{version} have nowhere to go: no gserver answered within "
                    f"{self._config.timeout_seconds:g} s; start one, or look at the gservers' logs"
                )
            seen = self._fleet.news

    async def _ask(self, gserver: Gserver) -> bool:
        try:
            gserver.info = await self._calls.info(gserver)
        except StreamRLError as error:
            log.warning("%s is left out of the weight update: %s", gserver.name, error)
            return False
        return True

    def _group_of(self, members: list[Gserver], publisher_has: str) -> WeightGroup:
        """The group in use if it still fits, else a new one."""
        old = self._group
        if old is not None:
            if old.formed and not old.broken and old.name == publisher_has and old.members == tuple(members):
                return old
            if not old.broken:
                self._destroy(old)
        self._group = WeightGroup(f"weights-{self._run_name}-{next(self._group_numbers)}", tuple(members))
        return self._group

    def _destroy(self, group: WeightGroup) -> None:
        """Let the members leave `group`, in the background: nothing depends on it."""
        for gserver in group.members:
            if self._fleet.is_member(gserver):
                self._in_background(self._leave(gserver, group.name))

    async def _leave(self, gserver: Gserver, group: str) -> None:
        try:
            await self._calls.leave_group(gserver, group)
        except StreamRLError as error:
            log.info("%s did not leave the weight group %s: %s", gserver.name, group, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
