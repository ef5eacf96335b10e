"""The manager's side of a publication: the publisher begins an update, sends the weights, and commits.

`WeightUpdates` owns the weight group and the update in progress; the ledger owns the version that the gservers serve
(`Ledger.policy_version`). It decides which gservers take part and in which group; `WeightUpdate` (`update.py`) carries
out the update.

A gserver lacks the served weights if it joined late, came back, or failed in an update; after a rewind all gservers do.
`resync_needed` returns them to the master, and the publisher publishes the served version again, to them alone
(`PublishBegin.resync`).

Invariants: at most one update is in progress. Except during a swap every gserver that is given groups serves the policy
version. A gserver that failed in `weights.attempts` resyncs to a version waits for the next version.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from streamrl.config import Config
from streamrl.errors import PublicationError, StreamRLError
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.registry import MemberEvent, MemberState
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.gserver.updates.update import UpdateRecord, WeightGroup, WeightUpdate
from streamrl.ledger import Ledger
from streamrl.transport.control import (
    Broadcast,
    GserverPlaces,
    PublishBegin,
    PublishBeginReply,
    PublishCommit,
    PublishReply,
    Snapshot,
)
from streamrl.waits import Wakeup

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class WeightUpdates:
    """All weight updates of a run: the publisher begins and commits them, the master waits for needed resyncs.

    As soon as the first gserver serves a new version, the ledger advances to it.
    """

    config: Config
    ledger: Ledger
    fleet: Fleet
    changed: Wakeup
    """Notified when a gserver sends a message, or may lack the served weights."""
    calls: WeightCalls
    on_version: Callable[[int], None]
    """Called with a new version as soon as the first gserver serves it."""
    on_record: Callable[[UpdateRecord], None]
    """Called with the record of every attempt that has ended."""
    on_unrecoverable: Callable[[str], None]
    """Called with the reason why no live gserver can be brought to the served weights."""

    def __post_init__(self) -> None:
        self.completed = 0
        """Number of updates that took effect."""
        self.failed = 0
        """Number of attempts that were rolled back."""
        self.pause_seconds_total = 0.0
        """Sum of the longest pauses of generation of all attempts."""
        self.last: UpdateRecord | None = None
        """The latest attempt that has ended."""
        self._group: WeightGroup | None = None
        self._run_name = uuid.uuid4().hex[:8]  # a server that joins several runs in turn keeps the groups of each
        self._group_numbers = itertools.count(1)
        self._update: WeightUpdate | None = None
        self._running: asyncio.Task[PublishReply] | None = None
        self._beginning = asyncio.Lock()

    async def abort(self, reason: str) -> None:
        """Abort the update in progress for `reason`, and wait until it has ended."""
        await self._until_ended(lambda update: update.abort(reason))

    @property
    def under_way(self) -> bool:
        """Whether an update is in progress."""
        return self._running is not None and not self._running.done()

    def status(self) -> dict[str, Any]:
        """Return the state of the update in progress, the counts of updates, and the record of the last one."""
        now = self._update.status() if self._update else {"state": "idle"}
        last = msgspec.to_builtins(self.last) if self.last else None
        return {**now, "completed": self.completed, "failed": self.failed, "last": last}

    async def places(self) -> GserverPlaces:
        """Return the machines and the GPUs of all gservers that are not silent."""
        heard = [g for g in self.fleet.all() if not g.silent]
        return GserverPlaces(machines=sorted({g.machine for g in heard}), gpus=sorted({g.gpu for g in heard}))

    async def begin(self, message: PublishBegin) -> PublishBeginReply:
        """Choose the gservers that take part, start their update, and return the group in which they wait.

        An update that is still in progress is rolled back first. A resync that no gserver needs any more starts
        nothing: the returned group has only the publisher as a member.

        Raises `PublicationError` if the version is not newer than the served one, if no gserver replies within
        `limits.update_seconds`, or if none of them can read the snapshot.
        """
        async with self._beginning:
            await self.abort("the publisher began another update")
            members = await (self._members_to_resync if message.resync else self._members_of_update)(message)
            if not members:
                return PublishBeginReply(group_name="", world_size=1)
            group, joined = self._group_for(members, message)
            update = self._update = WeightUpdate(
                version=message.version,
                weights=message.weights,
                group=group,
                joined=joined,
                calls=self.calls,
                config=self.config,
                ledger=self.ledger,
                on_swapped=self._swapped,
            )
            self._running = asyncio.create_task(self._run(update, message), name=f"weights v{message.version}")
            return PublishBeginReply(group_name=group.name, world_size=group.world_size)

    async def commit(self, message: PublishCommit) -> PublishReply:
        """Note the end of the publisher's sending, or its error; return the outcome of the update once it has ended.

        Another call for the same update returns the same outcome. Raises `PublicationError` if there is no such update.
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
        """Wait for gservers that lack the served weights while no update is in progress; return their names."""
        await self.changed.until(lambda: not self.under_way and bool(self._lacking()))
        return [gserver.name for gserver in self._lacking()]

    def look_for_lacking(self) -> None:
        """Wake `resync_needed` after an event that may have left a gserver behind.

        Calls `on_unrecoverable` if every live gserver has failed `weights.attempts` times.
        """
        self.changed.notify()
        attempts = self.config.weights.attempts
        failed = [
            g
            for g in self.fleet.all()
            if g.state is MemberState.EVICTED and g.failed_resyncs >= attempts and not g.silent
        ]
        if failed and not self.under_way and len(failed) == sum(not g.silent for g in self.fleet.all()):
            names = ", ".join(g.name for g in failed)
            self.on_unrecoverable(
                f"no gserver serves weights v{self.ledger.policy_version}, and {names} could not be brought to them "
                f"in {attempts} attempts each; see the controller's log"
            )

    async def close(self) -> None:
        """Roll back the update in progress, and resume every gserver that it has paused."""
        await self._until_ended(WeightUpdate.leave)
        await self.calls.close()

    async def _until_ended(self, end: Callable[[WeightUpdate], None]) -> None:
        """Call `end` with the update in progress, if any, and wait until it has ended."""
        if self._update is not None and self._running is not None and self.under_way:
            end(self._update)
            await asyncio.wait({self._running})

    async def _run(self, update: WeightUpdate, message: PublishBegin) -> PublishReply:
        reply = await update.run()
        record = self.last = update.record
        self.pause_seconds_total += record.pause_seconds
        if record.done:
            self.completed += 1
            how = "resynced" if message.resync else "updated"
            names = ", ".join(g.name for g in update.group.members if g.index not in record.evicted)
            log.info("%s %s to weights v%d after a pause of %.3f s", names, how, record.version, record.pause_seconds)
        else:
            self.failed += 1
            if isinstance(message.weights, Broadcast):
                self._leave_group()
            log.warning("weights v%d rolled back: %s", record.version, record.error)
        if record.evicted:
            log.warning("weights v%d: evicted gservers %s", record.version, record.evicted)
        if message.resync:
            lacking = [g for g in update.group.members if g.lacks_weights]
            blamed = [g for g in lacking if g.failed_version == update.version]
            for gserver in blamed or lacking:
                gserver.handle(MemberEvent.RESYNC_FAILED)
        elif record.done:
            for gserver in self.fleet.all():
                gserver.failed_resyncs = 0
        self.on_record(record)
        asyncio.get_running_loop().call_soon(self.look_for_lacking)  # when this task has ended
        return reply

    def _swapped(self, version: int) -> None:
        self.ledger.advance(version)
        if self._update is not None:
            self.fleet.updated(self._update.group.members)
        self.on_version(version)

    # Membership of an update

    def _lacking(self) -> list[Gserver]:
        """Return the live gservers that do not serve the policy version and may be resynced to it."""
        evicted = [g for g in self.fleet.all() if g.state is MemberState.EVICTED]
        return [gserver for gserver in evicted if gserver.failed_resyncs < self.config.weights.attempts]

    async def _members_to_resync(self, message: PublishBegin) -> list[Gserver]:
        """Return the gservers that lack the served version, can read it, and reply; possibly none.

        A gserver that caused an earlier attempt to fail is tried again when no other lacks the version.
        """
        if message.version != self.ledger.policy_version:
            return []
        lacking = self._lacking()
        able, problem = _readers(message.weights, lacking)
        if problem:
            log.error("%s", problem)
        for gserver in lacking:
            if gserver not in able:
                gserver.handle(MemberEvent.RESYNC_FAILED)
        return await self._responding([g for g in able if g.failed_version != message.version] or able)

    async def _members_of_update(self, message: PublishBegin) -> list[Gserver]:
        """Return the gservers that reply now, waiting for the first if none does. Raises the errors of `begin`."""
        version, served = message.version, self.ledger.policy_version
        if version <= served:
            raise PublicationError(f"version {version} cannot be published: the gservers are at {served}")
        deadline = time.monotonic() + self.config.limits.update_seconds
        while True:
            candidates, problem = _readers(message.weights, self.fleet.candidates(version))
            if problem and not candidates:
                raise PublicationError(problem)
            if problem:
                log.error("%s", problem)
            live = await self._responding(candidates)
            if live:
                return live
            log.warning("weights v%d wait for a gserver: none of %d replies", version, len(candidates))
            left = deadline - time.monotonic()
            if left <= 0 or not await self.changed.sleep(left):
                raise PublicationError(
                    f"weights v{version} cannot be published: no gserver replied within "
                    f"{self.config.limits.update_seconds:g} s; start one, or look at the gservers' logs"
                )

    async def _responding(self, gservers: list[Gserver]) -> list[Gserver]:
        """Request the abilities of `gservers`; return those that reply and still have their place in the run."""
        replied = await asyncio.gather(*(self._responds(g) for g in gservers))
        return [g for g, lives in zip(gservers, replied, strict=True) if lives and g.takes_part]

    async def _responds(self, gserver: Gserver) -> bool:
        try:
            gserver.info = await self.calls.info(gserver)
        except StreamRLError as error:
            log.warning("%s is left out of weight updates until it replies: %s", gserver.name, error)
            gserver.handle(MemberEvent.UNREACHABLE)
            return False
        return True

    def _group_for(self, members: list[Gserver], message: PublishBegin) -> tuple[WeightGroup, bool]:
        """Return the weight group of `members`, and whether they have joined it.

        It is the group of the last broadcast if the members and the publisher's group name match, else a new one.
        """
        new = WeightGroup(f"weights-{self._run_name}-{next(self._group_numbers)}", tuple(members))
        if isinstance(message.weights, Snapshot):
            return new, False
        old = self._group
        if old is not None and old.name == message.weights.group_name and old.members == new.members:
            return old, True
        self._leave_group()
        self._group = new
        return new, False

    def _leave_group(self) -> None:
        """Have the members of the weight group leave it, in the background."""
        if self._group is not None:
            self.calls.leave_group(self._group.name, [g for g in self._group.members if g.takes_part])
            self._group = None


def _readers(weights: Broadcast | Snapshot, gservers: list[Gserver]) -> tuple[list[Gserver], str]:
    """Return the `gservers` that the weights can reach, and an error message about the others; empty if none."""
    if isinstance(weights, Broadcast):
        return gservers, ""
    able = [g for g in gservers if weights.readable_by(g.machine, g.gpu)]
    far = ", ".join(f"{g.name} on {g.host}" for g in gservers if g not in able)
    memory, several = ("memory of the trainer's GPU", "GPUs") if weights.gpu else ("shared memory", "hosts")
    problem = (
        f"weights in {memory} reach gservers on the trainer's {several[:-1]} alone, and not {far}; for several "
        f'{several} set weights.mode to "auto" or "collective", or to "disk" where hosts share one'
    )
    return able, problem if far else ""
