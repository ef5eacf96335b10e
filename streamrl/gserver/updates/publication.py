"""The manager's end of a publication: the publisher begins an update, sends the weights, and commits.

`WeightUpdates` owns the weight group and the update in progress; the version that the gservers serve is the ledger's
(`Ledger.policy_version`). It decides which gservers take part and in which group; `WeightUpdate` (`update.py`) carries
the update through, and `Resyncs` (`resync.py`) brings the remaining gservers to the same weights afterwards.

Invariants: at most one update by the publisher is under way. Except within the moments of a swap every gserver that is
given groups serves the policy version.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from streamrl.config import WeightsConfig
from streamrl.errors import PublicationError, StreamRLError
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.member_states import MemberEvent
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.manager.run_state import Wakeup
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.gserver.updates.resync import CurrentWeights, Resyncs
from streamrl.gserver.updates.states import Stage
from streamrl.gserver.updates.update import UpdateRecord, WeightGroup, WeightUpdate, stages_weights
from streamrl.ledger import Ledger
from streamrl.transport.control import (
    Broadcast,
    GserverPlaces,
    PublishBegin,
    PublishBeginReply,
    PublishCommit,
    PublishReply,
    Snapshot,
    group_of_sender,
)
from streamrl.transport.generation import StagedWeights

log = logging.getLogger(__name__)


class WeightUpdates:
    """What the publisher calls: it begins an update, commits it, and asks which gservers need a resync."""

    def __init__(
        self,
        *,
        config: WeightsConfig,
        ledger: Ledger,
        fleet: Fleet,
        changed: Wakeup,
        calls: WeightCalls,
        on_version: Callable[[int], None],
        on_record: Callable[[UpdateRecord], None],
        on_unrecoverable: Callable[[str], None],
    ) -> None:
        """`changed` is notified when a gserver is heard of, or may lack the current weights. As soon as the first
        gserver serves a new version, the ledger advances to it and `on_version` is called. `on_record` is called with
        the record of every attempt that has ended, `on_unrecoverable` with the reason why no live gserver can be
        brought to the current weights."""
        self.completed = 0
        """Updates that took effect."""
        self.failed = 0
        """Attempts that were rolled back."""
        self.pause_seconds_total = 0.0
        """Sum of the longest pauses of generation of all attempts."""
        self.last: UpdateRecord | None = None
        """The latest attempt that has ended."""
        self._config = config
        self._ledger = ledger
        self._fleet = fleet
        self._changed = changed
        self._calls = calls
        self._on_version = on_version
        self._on_record = on_record
        self.resyncs = Resyncs(
            config=config,
            fleet=fleet,
            calls=calls,
            changed=changed,
            ledger=ledger,
            updating=lambda: self.under_way,
            on_unrecoverable=on_unrecoverable,
        )
        self._group: WeightGroup | None = None
        self._run_name = uuid.uuid4().hex[:8]  # a server that several runs join after another still has their groups
        self._group_numbers = itertools.count(1)
        self._update: WeightUpdate | None = None
        self._running: asyncio.Task[PublishReply] | None = None
        self._beginning = asyncio.Lock()
        self._distrusted = ""
        """The transfer that was found to be other weights than were trained: nothing that is staged of it counts."""

    async def end_all(self) -> None:
        """Abort what is under way, and wait for its end: the run goes back to an earlier version."""
        abort = self._until_ended(lambda update: update.abort("the run goes back to an earlier version"))
        await asyncio.gather(self.resyncs.end_all(), abort)
        self._distrusted = ""

    @property
    def under_way(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._running is not None and not self._running.done()

    def status(self) -> dict[str, Any]:
        """Return the state of the update in progress, the counts of updates, and the record of the last one."""
        now = self._update.status() if self._update else {"state": Stage.IDLE.value}
        last = msgspec.to_builtins(self.last) if self.last else None
        return {**now, "completed": self.completed, "failed": self.failed, "last": last}

    async def places(self) -> GserverPlaces:
        """Return the machines and the GPUs of all gservers that are not silent."""
        heard = [g for g in self._fleet.all() if not g.silent]
        return GserverPlaces(machines=sorted({g.machine for g in heard}), gpus=sorted({g.gpu for g in heard}))

    async def begin(self, message: PublishBegin) -> PublishBeginReply:
        """Choose the gservers that take part, start their update, and return the group in which they wait.

        An update that is still in progress is rolled back first. A resync that no gserver needs any more starts
        nothing: the group that is returned has no member but the publisher.

        Raises `PublicationError` when the version is not newer than the one served, when no gserver replies within
        `weights.timeout_seconds`, or when none of them can read the snapshot.
        """
        async with self._beginning:
            await self._until_ended(lambda update: update.abort("the publisher began another update"))
            members = await (self._members_to_resync if message.resync else self._members_of_update)(message)
            if not members:
                return PublishBeginReply(group_name="", world_size=1)
            members, first_buckets = self._resumed(message.weights, members)
            base = _common_base(message.weights, members, label=self._ledger.lineage.label)
            group = self._group_of(members, message)
            update = self._update = WeightUpdate(
                version=message.version,
                weights=message.weights,
                group=group,
                calls=self._calls,
                config=self._config,
                ledger=self._ledger,
                first_buckets=first_buckets,
                base=base,
                on_swapped=None if message.resync else self._swapped,
            )
            self._running = asyncio.create_task(self._run(update, message), name=f"weights v{message.version}")
            return PublishBeginReply(
                group_name=group.name,
                world_size=group.world_size,
                first_buckets=first_buckets,
                as_deltas=base is not None,
            )

    async def commit(self, message: PublishCommit) -> PublishReply:
        """Note that the publisher has sent everything, or why it could not; wait for the end of the update and return
        its outcome. Another call for the same update returns the same outcome.

        Raises `PublicationError` when no such update was begun.
        """
        update, running = self._update, self._running
        named = (message.version, message.group_name)
        if update is None or running is None or (update.version, update.group.name) != named:
            raise PublicationError(
                f"there is no update to version {message.version} in group {message.group_name!r}; begin it first"
            )
        update.commit(message.error, message.checksums)
        return await asyncio.shield(running)

    async def resync_needed(self) -> list[str]:
        """Wait for gservers that only the publisher can resync to the current weights; return their names."""
        needed = self.resyncs.from_publisher
        await self._changed.until(lambda: bool(needed()), timeout=None)
        return [gserver.name for gserver in needed()]

    async def close(self) -> None:
        """Roll back the update in progress, end all resyncs, and resume every gserver that they have paused."""
        await asyncio.gather(self.resyncs.close(), self._until_ended(WeightUpdate.leave))
        await self._calls.close()

    async def _until_ended(self, end: Callable[[WeightUpdate], None]) -> None:
        """Call `end` with the update that is under way, if one is, and wait until it has ended."""
        if self._update is not None and self._running is not None and self.under_way:
            end(self._update)
            await asyncio.wait({self._running})

    async def _run(self, update: WeightUpdate, message: PublishBegin) -> PublishReply:
        reply = await update.run()
        record = self.last = update.record
        self.pause_seconds_total += record.pause_seconds
        if record.done:
            self.completed += 1
            log.info("weights v%d served after a pause of %.3f s", record.version, record.pause_seconds)
        else:
            self.failed += 1
            if isinstance(message.weights, Broadcast):
                self._destroy(update.group)
                if Stage.CHECKING.value in record.reached:
                    self._distrusted = message.weights.transfer
            log.warning("weights v%d rolled back: %s", record.version, record.error)
        if record.evicted:
            log.warning("weights v%d: evicted gservers %s", record.version, record.evicted)
        if record.done and not message.resync:
            snapshot = message.weights if isinstance(message.weights, Snapshot) else None
            self.resyncs.weights_served(CurrentWeights(update.version, snapshot, update.checksums))
        elif not record.done and message.resync:
            for gserver in update.group.members:
                gserver.handle(MemberEvent.RESYNC_FAILED)
        self._on_record(record)
        asyncio.get_running_loop().call_soon(self.resyncs.start)  # when this task has ended
        return reply

    def _swapped(self, version: int) -> None:
        self._ledger.advance(version)
        if self._update is not None:
            self._fleet.updated(self._update.group.members)
        self._on_version(version)

    # Who takes part

    async def _members_to_resync(self, message: PublishBegin) -> list[Gserver]:
        """Return the gservers that only the publisher can bring to the version served, and that reply; perhaps none."""
        lacking = self.resyncs.from_publisher() if message.version == self._ledger.policy_version else []
        return await self._responding(lacking)

    async def _members_of_update(self, message: PublishBegin) -> list[Gserver]:
        """Return the gservers that reply now, at least one: wait for it if there is none. Raises as `begin` does."""
        version, served = message.version, self._ledger.policy_version
        if version <= served:
            raise PublicationError(f"version {version} cannot be published: the gservers are at {served}")
        deadline = time.monotonic() + self._config.timeout_seconds
        seen = self._fleet.news
        while True:
            busy = self.resyncs.addresses  # they stay behind, and are resynced again
            candidates = [g for g in self._fleet.candidates(version) if g.address not in busy]
            if isinstance(message.weights, Snapshot):
                candidates = _able_to_read(message.weights, candidates)
            live = await self._responding(candidates)
            if live:
                for gserver in live:
                    gserver.overtaken_resyncs = 0
                return live
            log.warning("weights v%d wait for a gserver: none of %d replies", version, len(candidates))
            left = deadline - time.monotonic()
            if left <= 0 or not await self._changed.until(partial(self._fleet.has_news_since, seen), timeout=left):
                raise PublicationError(
                    f"weights v{version} have nowhere to go: no gserver answered within "
                    f"{self._config.timeout_seconds:g} s; start one, or look at the gservers' logs"
                )
            seen = self._fleet.news

    async def _responding(self, gservers: list[Gserver]) -> list[Gserver]:
        """Ask `gservers` what they can do; return those that reply, still have their place in the run, and have not
        begun to be resynced meanwhile."""
        replied = await asyncio.gather(*(self._responds(g) for g in gservers))
        live = [g for g, lives in zip(gservers, replied, strict=True) if lives and g.takes_part]
        return [g for g in live if g.address not in self.resyncs.addresses]

    async def _responds(self, gserver: Gserver) -> bool:
        try:
            gserver.info = await self._calls.info(gserver)
        except StreamRLError as error:
            log.warning("%s is left out of weight updates until it replies: %s", gserver.name, error)
            gserver.handle(MemberEvent.UNREACHABLE)
            return False
        return True

    def _resumed(self, weights: Broadcast | Snapshot, members: list[Gserver]) -> tuple[list[Gserver], list[int]]:
        """Return which of `members` take part in this attempt, and the bucket with which each sender begins (empty: the
        first).

        If an earlier attempt left a part of these weights staged, the gservers that have it take part alone, and each
        sender goes on with the first bucket that one of them lacks. The others are resynced afterwards.
        """
        if not isinstance(weights, Broadcast) or weights.transfer == self._distrusted:
            return members, []
        infos = {gserver: gserver.info.staged for gserver in members if gserver.info is not None}
        staged = {g: found.buckets for g, found in infos.items() if found is not None and _is_of(weights, found)}
        first_buckets = [min(counts) for counts in zip(*staged.values(), strict=True)]
        return (list(staged), first_buckets) if any(first_buckets) else (members, [])

    def _group_of(self, members: list[Gserver], message: PublishBegin) -> WeightGroup:
        """Return the weight group of `members`: the one in use if it is theirs and sound, else a new one."""
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
        self._group = WeightGroup(name, tuple(members), senders=len(message.weights.senders))
        return self._group

    def _destroy(self, group: WeightGroup) -> None:
        """Have the members of `group` leave it, in the background."""
        members = [gserver for gserver in group.members if gserver.takes_part]
        self._calls.leave_group(group.name, members)
        with_a_group_for_each = [gserver for gserver in members if not stages_weights(gserver)]
        for number in range(1, group.senders):
            self._calls.leave_group(group_of_sender(group.name, number), with_a_group_for_each)


def _common_base(weights: Broadcast | Snapshot, members: list[Gserver], *, label: Callable[[int], str]) -> int | None:
    """Return the version from which deltas may be sent, one that all `members` serve and can apply deltas to; None:
    weights have to be sent whole. `label` returns what gservers call a version."""
    if not isinstance(weights, Broadcast) or weights.base is None:
        return None
    infos = [gserver.info for gserver in members]
    able = all(info and info.applies_deltas and info.weight_version == label(weights.base) for info in infos)
    return weights.base if able else None


def _is_of(weights: Broadcast, staged: StagedWeights) -> bool:
    return staged.transfer == weights.transfer and len(staged.buckets) == len(weights.senders)


def _able_to_read(snapshot: Snapshot, gservers: list[Gserver]) -> list[Gserver]:
    """Return those of `gservers` that can read the snapshot; raises `PublicationError` when none of them can."""
    able = [g for g in gservers if snapshot.readable_by(g.machine, g.gpu)]
    far = ", ".join(f"{g.name} on {g.host}" for g in gservers if g not in able)
    memory, several = ("memory of the trainer's GPU", "GPUs") if snapshot.gpu else ("shared memory", "hosts")
    problem = (
        f"weights in {memory} reach gservers on the trainer's {several[:-1]} alone, and not {far}; for several "
        f'{several} set weights.mode to "auto" or "collective", or to "disk" where hosts share one'
    )
    if far and not able:
        raise PublicationError(problem)
    if far:
        log.error("%s", problem)
    return able
