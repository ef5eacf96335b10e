"""Weight publication on the manager's side: who takes part, in which group, one update at a time.

Owns the weight group and the update in progress (`weight_update.py` carries one through), and has gservers that
come late brought up to date (`catch_up.py`). The publisher calls `begin`, broadcasts where weights are
broadcast, and calls `commit`.

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
from streamrl.gserver.catch_up import CatchUps, Offer
from streamrl.gserver.routing import Fleet, Gserver, Standing
from streamrl.gserver.update_states import Stage
from streamrl.gserver.wakeup import Wakeup
from streamrl.gserver.weight_calls import WeightCalls
from streamrl.gserver.weight_update import UpdateRecord, WeightGroup, WeightUpdate
from streamrl.transport.control.publication import (
    Broadcast,
    PublishBegin,
    PublishBeginReply,
    PublishCommit,
    PublishReply,
    Snapshot,
    Wanted,
)

log = logging.getLogger(__name__)


class WeightUpdates:
    """Answers the publisher. `on_version` hears a new version as soon as the first gserver serves it;
    `on_record` hears every attempt that has ended; `on_hopeless` hears why no gserver that lives can be
    brought to the current weights."""

    def __init__(
        self,
        *,
        config: WeightsConfig,
        fleet: Fleet,
        changed: Wakeup,
        calls: WeightCalls,
        on_version: Callable[[int], None],
        on_record: Callable[[UpdateRecord], None],
        on_hopeless: Callable[[str], None],
        version: int = 0,
    ) -> None:
        """`version`: what gservers of this run start with."""
        self.version = version
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
        self._on_hopeless = on_hopeless
        self._catch_ups = CatchUps(
            config=config, fleet=fleet, calls=calls, current=lambda: self.version, on_ended=self._caught_up
        )
        self._group: WeightGroup | None = None
        self._run_name = uuid.uuid4().hex[:8]  # a server that several runs join after another still has their groups
        self._group_numbers = itertools.count(1)
        self._update: WeightUpdate | None = None
        self._running: asyncio.Task[PublishReply] | None = None
        self._beginning = asyncio.Lock()
        self._closing = False
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

        Raises `PublicationError` when the version is not newer, when no gserver answers within
        `weights.timeout_seconds`, or when none can read the snapshot.
        """
        async with self._beginning:
            await self._settle_previous()
            if message.again:
                members = await self._late(message.version)
                if not members:
                    return PublishBeginReply(group_name="", world_size=1)
            elif message.version <= self.version:
                raise PublicationError(
                    f"version {message.version} cannot be published: the gservers are at {self.version}"
                )
            else:
                members = await self._pick(message)
            group = self._group_of(members, message)
            update = self._update = WeightUpdate(
                version=message.version,
                old_version=self.version,
                weights=message.weights,
                group=group,
                calls=self._calls,
                config=self._config,
                on_swapped=self._served_again if message.again else self._swapped,
                current=lambda: self.version,
            )
            self._running = asyncio.create_task(self._run(update, message), name=f"weights v{message.version}")
            return PublishBeginReply(group_name=group.name, world_size=group.world_size)

    async def commit(self, message: PublishCommit) -> PublishReply:
        """The publisher's end of the update; answers how it went, the same however often it is asked."""
        update, running = self._update, self._running
        asked = (message.version, message.group_name)
        if update is None or running is None or (update.version, update.group.name) != asked:
            raise PublicationError(
                f"there is no update to version {message.version} in group {message.group_name!r}; begin it first"
            )
        update.commit(message.error, message.checksums)
        return await asyncio.shield(running)

    async def wanted(self, *, timeout: float) -> Wanted:
        """Who waits for the current weights, which only the publisher can send; waits for one to do so."""
        await self._changed.until(lambda: bool(self._wanting()) or self._closing, timeout=timeout)
        return Wanted(
            version=self.version, gservers=[g.name for g in self._wanting()], serving=self._fleet.serving_count
        )

    def _wanting(self) -> list[Gserver]:
        return [] if self.under_way or self._closing else self._catch_ups.wanted(self.version)

    def heard(self, gserver: Gserver) -> None:
        """A heartbeat of `gserver` has come."""
        if gserver.failing:
            gserver.failing = False
            gserver.failed_catch_ups += 1
            self.look_for_laggards()
            self._give_up_if_hopeless()

    def look_for_laggards(self) -> None:
        """Bring those up to date that lack the current weights, unless an update is on its way to them."""
        self._changed.notify()
        if not self.under_way and not self._closing:
            self._catch_ups.look()

    async def close(self) -> None:
        """Roll back what is in progress, resume everyone, and forget the group."""
        self._closing = True
        if self._update is not None and self._running is not None and self.under_way:
            self._update.leave()
            await asyncio.wait({self._running})
        await self._catch_ups.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _settle_previous(self) -> None:
        if self._update is not None and self._running is not None and self.under_way:
            self._update.abort("the publisher began another update")
            await asyncio.wait({self._running})

    async def _run(self, update: WeightUpdate, message: PublishBegin) -> PublishReply:
        reply = await update.run()
        record = self.last = update.record
        if record.done:
            self.completed += 1
            log.info("weights v%d served after a pause of %.3f s", record.version, record.pause_seconds)
        else:
            self.failed += 1
            if isinstance(message.weights, Broadcast):
                self._destroy(update.group)
            log.warning("weights v%d rolled back: %s", record.version, record.error)
        if record.evicted:
            log.warning("weights v%d: evicted gservers %s", record.version, record.evicted)
        if record.done and not message.again:
            files = message.weights if isinstance(message.weights, Snapshot) else None
            self._catch_ups.offer(Offer(update.version, files, update.checksums))
        elif not record.done and message.again:
            for gserver in update.group.members:
                gserver.failing = True
        self._on_record(record)
        asyncio.get_running_loop().call_soon(self._settled, update.lost)
        return reply

    def _settled(self, lost: bool) -> None:
        """After an update: look for those whom it left behind."""
        self.look_for_laggards()
        if not lost:
            self._give_up_if_hopeless()
        self._changed.notify()

    def _caught_up(self) -> None:
        self._fleet.news += 1
        self.look_for_laggards()
        self._give_up_if_hopeless()
        self._changed.notify()

    def _give_up_if_hopeless(self) -> None:
        """The run ends when every gserver that lives has failed too often to take the current weights."""
        heard = [g for g in self._fleet.all() if g.standing is not Standing.SILENT]
        failed = [g for g in heard if g.failed_catch_ups >= self._config.attempts]
        if heard and len(failed) == len(heard) and not self.under_way:
            names = ", ".join(g.name for g in failed)
            self._on_hopeless(
                f"no gserver serves weights v{self.version}, and {names} could not be brought to them in "
                f"{self._config.attempts} attempts each; the manager's log says why"
            )

    def _swapped(self, version: int) -> None:
        self.version = version
        if self._update is not None:
            self._fleet.updated(self._update.group.members)
        self._on_version(version)

    def _served_again(self, version: int) -> None:
        self._changed.notify()

    async def _late(self, version: int) -> list[Gserver]:
        """Those that wait for the publisher to send `version` again, and answer."""
        wanting = self._catch_ups.wanted(version) if version == self.version else []
        living = await self._living(wanting)
        for gserver in wanting:
            if gserver not in living:
                gserver.failing = True
        return living

    async def _pick(self, message: PublishBegin) -> list[Gserver]:
        """The gservers that answer now; waits for one if there is none."""
        version = message.version
        deadline = time.monotonic() + self._config.timeout_seconds
        seen = self._fleet.news
        while True:
            busy = self._catch_ups.busy  # they stay behind, and catch up again
            candidates = [g for g in self._fleet.candidates(version) if g.address not in busy]
            if isinstance(message.weights, Snapshot):
                candidates = _able_to_read(message.weights, candidates)
            live = await self._living(candidates)
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

    async def _living(self, gservers: list[Gserver]) -> list[Gserver]:
        answered = await asyncio.gather(*(self._ask(g) for g in gservers))
        return [g for g, lives in zip(gservers, answered, strict=True) if lives and self._fleet.is_member(g)]

    async def _ask(self, gserver: Gserver) -> bool:
        try:
            gserver.info = await self._calls.info(gserver)
        except StreamRLError as error:
            log.warning("%s is left out of the weight update: %s", gserver.name, error)
            return False
        return True

    def _group_of(self, members: list[Gserver], message: PublishBegin) -> WeightGroup:
        """The group in use if it still fits, else a new one."""
        name = f"weights-{self._run_name}-{next(self._group_numbers)}"
        if isinstance(message.weights, Snapshot):
            return WeightGroup(name, tuple(members))
        old = self._group
        if old is not None:
            in_use = old.formed and not old.broken and old.name == message.weights.group_name
            if in_use and old.members == tuple(members):
                return old
            if not old.broken:
                self._destroy(old)
        self._group = WeightGroup(name, tuple(members))
        return self._group

    def _destroy(self, group: WeightGroup) -> None:
        """Let the members leave `group`, in the background: nothing depends on it."""
        for gserver in group.members:
            if self._fleet.is_member(gserver):
                self._in_background(self._calls.leave_group(gserver, group.name))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _able_to_read(snapshot: Snapshot, gservers: list[Gserver]) -> list[Gserver]:
    """Those on the host of the snapshot; raises `PublicationError` when there are others alone."""
    able = [g for g in gservers if snapshot.readable_on(g.host)]
    far = ", ".join(f"{g.name} on {g.host}" for g in gservers if g not in able)
    problem = (
        f"weights in shared memory reach gservers on {snapshot.host} alone, and not {far}; for several hosts set "
        'weights.host to an address that all of them reach and weights.mode to "collective", or take "disk"'
    )
    if far and not able:
        raise PublicationError(problem)
    if far:
        log.error("%s", problem)
    return able
