"""One attempt at a weight update: carries out the actions that the pure states (`states.py`) decide on.

`WeightUpdate` owns the calls in progress, the clock and the record of the attempt.

Invariants: every call has a deadline; a call that no longer matters is cancelled; `run` ends only after every paused
gserver was requested to resume.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from streamrl import essential
from streamrl.config import Config
from streamrl.errors import DeadlineExceeded, PeerLost, StreamRLError
from streamrl.gserver.manager.gserver import Gserver, serves
from streamrl.gserver.manager.registry import MemberEvent, MemberState
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.gserver.updates.states import (
    Action,
    MemberHealth,
    Serves,
    UpdateStates,
    UpdateStep,
    Way,
    plan_for,
)
from streamrl.ledger import Ledger
from streamrl.transport.control import Broadcast, PublishReply, Snapshot
from streamrl.transport.generation import MIXED_WEIGHTS, InitWeightsUpdateGroup, adapter_name

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""Time, in seconds, for the other gservers to do their part after a first failure; separates cause from effect."""
CLOSING_SECONDS = 2.0
"""Deadline, in seconds, for each gserver to be resumed when the manager itself leaves."""


@dataclass(frozen=True, eq=False)
class WeightGroup:
    """The gservers that take part. For a broadcast the publisher is rank 0 of a process group, and the ranks of
    `members` follow from 1 on, in this order."""

    name: str
    members: tuple[Gserver, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks of the publisher and all members."""
        return 1 + sum(gserver.ranks for gserver in self.members)

    def first_rank(self, gserver: Gserver) -> int:
        """Return the first rank of this member in the group."""
        return 1 + sum(before.ranks for before in self.members[: self.members.index(gserver)])


class UpdateRecord(msgspec.Struct, kw_only=True):
    """The record of one attempt; points in time are in seconds since the epoch."""

    version: int
    group: str
    gservers: list[int]
    begin: float
    end: float = 0.0
    pause_seconds: float = 0.0
    """Longest pause of generation on any gserver."""
    done: bool = False
    error: str = ""
    evicted: list[int] = []


class WeightUpdate:
    """One attempt to bring a group of gservers to a version; `run` it once."""

    def __init__(
        self,
        *,
        version: int,
        weights: Broadcast | Snapshot,
        group: WeightGroup,
        joined: bool,
        calls: WeightCalls,
        config: Config,
        ledger: Ledger,
        on_swapped: Callable[[int], None],
    ) -> None:
        """`joined`: all members have joined the group. `ledger` has the version that gservers must serve to get groups.

        If that version is older than `version`, `on_swapped` is called with `version` as soon as the first gserver
        serves it, and advances the ledger.
        """
        self.version = version
        self.group = group
        self.record = UpdateRecord(
            version=version, group=group.name, gservers=[g.index for g in group.members], begin=time.time()
        )
        self._checksums: dict[str, str] = {}
        """Name → checksum of each trained weight; known from the commit on."""
        self._ledger = ledger
        self._old_version = ledger.policy_version
        self._weights = weights
        self._calls = calls
        self._pause_mode = config.weights.pause_mode
        self._timeout = config.limits.update_seconds
        self._on_swapped = on_swapped
        self._states: UpdateStates[Gserver] = UpdateStates(
            {
                gserver: plan_for(
                    way=_way(weights),
                    staged=gserver.stages_weights,
                    joined=joined,
                    verified=config.weights.checksum,
                    cut=config.weights.pause_mode == "abort",
                )
                for gserver in group.members
            }
        )
        self._resume_timeout = self._timeout
        self._received: dict[Gserver, int] = {}
        """Number of buckets that each gserver has received."""
        self._tasks: dict[Action[Gserver], asyncio.Task[None]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_for = ""
        self._paused_at: dict[Gserver, float] = {}
        self._ended = asyncio.Event()

    def status(self) -> dict[str, Any]:
        """Return the state of the update and of each gserver in it, for display."""
        return {
            "state": self._states.state,
            "version": self.version,
            "group": self.group.name,
            "gservers": {g.name: step.value if step is not None else "" for g, step in self._states.steps().items()},
            "received": {g.name: buckets for g, buckets in self._received.items()},
        }

    def commit(self, error: str, checksums: dict[str, str]) -> None:
        """Note that the publisher has sent all weights, with these `checksums` (name → checksum); if it failed
        (`error`), roll back."""
        if error:
            self.abort(f"the publisher failed: {error}")
        elif not self._ended.is_set():
            self._checksums = self._checksums or checksums
            self._begin(self._states.commit())

    def abort(self, reason: str) -> None:
        """Roll back for `reason`, unless the publisher has committed."""
        self._begin(self._states.abort(reason))

    def leave(self) -> None:
        """End soon, because the manager itself leaves: only resume the gservers that this update has paused."""
        self._resume_timeout = min(self._resume_timeout, CLOSING_SECONDS)
        self._begin(self._states.leave("the manager leaves"))

    async def run(self) -> PublishReply:
        """Carry out the whole transaction and return its outcome. No failure of a gserver makes it raise an error."""
        self._begin(self._states.start())
        await self._ended.wait()
        return PublishReply(
            done=self.record.done,
            error=self.record.error,
            pause_seconds=self.record.pause_seconds,
            evicted=self.record.evicted,
        )

    def _begin(self, actions: Iterable[Action[Gserver]]) -> None:
        """Begin `actions`, cancel the actions that no longer matter, and record the progress of the update."""
        for action in actions:
            name = f"{action.step.value} on {action.who.name}"
            self._tasks[action] = essential.begin(self._carry_out(action), name=name)
        outstanding = self._states.outstanding
        if len(outstanding) < len(self._tasks):
            for action in self._tasks.keys() - outstanding:
                self._tasks.pop(action).cancel()
        self._record()
        self._set_alarm()

    def _record(self) -> None:
        """Update the record, the ledger and the gservers from the states."""
        if self._states.done and self._ledger.policy_version < self.version:
            self._on_swapped(self.version)
        for gserver in self._states.swapped:
            if gserver.state is not MemberState.SERVING:
                gserver.handle(MemberEvent.UPDATED)
        self.record.error = self._states.reason
        if self._states.ended and not self._ended.is_set():
            self._conclude()

    def _conclude(self) -> None:
        for gserver in self._states.evicted:
            gserver.handle(MemberEvent.UPDATE_FAILED)
        for gserver in self._states.blamed:
            gserver.failed_version = self.version
        self.record.done = self._states.done
        self.record.end = time.time()
        self.record.evicted = sorted(g.index for g in self._states.evicted)
        self._ended.set()

    def _set_alarm(self) -> None:
        """Set the timer for the event that the states await, if it is a new one; the timer calls `overdue`."""
        awaits = self._states.awaits
        if awaits == self._alarm_for:
            return
        self._alarm_for = awaits
        if self._alarm is not None:
            self._alarm.cancel()
        limit = self._timeout
        seconds = limit if awaits == "commit" else min(GRACE_SECONDS, limit)
        reason = f"the publisher did not commit within {limit:g} s after the last gserver was ready"
        if awaits:
            self._alarm = asyncio.get_running_loop().call_later(
                seconds, lambda: self._begin(self._states.overdue(reason))
            )

    async def _carry_out(self, action: Action[Gserver]) -> None:
        """Carry out one action, report its outcome to the states, and begin the actions that follow."""
        gserver = action.who
        try:
            if action.step is UpdateStep.ASK:
                label = await self._calls.label(gserver)
                self._end(action, self._states.serves(action, self._meaning(label)))
                return
            await self._call(action.step, gserver)
        except Exception as error:  # tolerance point: the update must end after any failure of a step
            if not isinstance(error, StreamRLError):
                log.exception("%s on %s failed", action.step.value, gserver.name)
            self._failed(action, error)
            return
        if action.step is UpdateStep.RESUME:
            gserver.handle(MemberEvent.RESUMED)
            now = time.monotonic()
            since = self._paused_at.pop(gserver, now)  # now: cancelled before its pause was requested
            self.record.pause_seconds = max(self.record.pause_seconds, now - since)
        self._end(action, self._states.succeeded(action))

    def _end(self, action: Action[Gserver], following: Iterable[Action[Gserver]]) -> None:
        """Begin the actions that follow `action`, whose task calls this."""
        self._tasks.pop(action, None)
        self._begin(following)

    def _failed(self, action: Action[Gserver], error: Exception) -> None:
        gserver, health = action.who, _health_of(error)
        if action.step is UpdateStep.RESUME:
            log.warning("%s could not be resumed and takes no groups until it can: %s", gserver.name, error)
        elif action.step is UpdateStep.CLEAR:
            log.warning("%s: requests could not be aborted: %s", gserver.name, error)
        if action.step is UpdateStep.RESUME or health is MemberHealth.LOST:
            gserver.handle(MemberEvent.UNREACHABLE)
        reason = f"{gserver.name} failed to {action.step.value}: {error}"
        self._end(action, self._states.failed(action, health, reason))

    async def _call(self, step: UpdateStep, gserver: Gserver) -> None:
        match step:
            case UpdateStep.JOIN:
                await self._join(gserver)
            case UpdateStep.BEGIN:
                await self._calls.begin(gserver)
            case UpdateStep.RECEIVE:
                await self._receive(gserver)
            case UpdateStep.VERIFY:
                await self._calls.verify(gserver, self._checksums)
            case UpdateStep.PAUSE:
                self._paused_at[gserver] = time.monotonic()
                await self._calls.pause(gserver, self._pause_mode)
                writes_over = not gserver.stages_weights and _way(self._weights) != "adapter"
                if self._pause_mode == "abort" and writes_over:
                    # SGLang has replied to its requests, but may still run them, and would not flush its cache.
                    await self._calls.pause(gserver, "retract")
            case UpdateStep.MARK:
                await self._calls.name(gserver, MIXED_WEIGHTS)
            case UpdateStep.SWAP if gserver.stages_weights:
                await self._calls.end(gserver)
            case UpdateStep.SWAP:
                if isinstance(self._weights, Broadcast):
                    await self._calls.end(gserver)
                await self._calls.name(gserver, self._label(self.version))
                if _way(self._weights) == "adapter":
                    self._calls.unload_old_adapters(gserver, serves=_adapter(self.version))
            case UpdateStep.CLEAR:
                await self._calls.abort_requests(gserver, timeout=self._resume_timeout)
            case UpdateStep.RESUME:
                await self._calls.resume(gserver, timeout=self._resume_timeout)

    async def _join(self, gserver: Gserver) -> None:
        assert isinstance(self._weights, Broadcast)
        message = InitWeightsUpdateGroup(
            master_address=self._weights.address,
            master_port=self._weights.port,
            rank_offset=self.group.first_rank(gserver),
            world_size=self.group.world_size,
            group_name=self.group.name,
            backend=self._weights.backend,
        )
        await self._calls.join_group(gserver, message)

    async def _receive(self, gserver: Gserver) -> None:
        """Have `gserver` receive the weights into its stage or, without one, over the served weights."""
        weights, staged = self._weights, gserver.stages_weights
        label = self._label(self.version) if staged else None
        # SGLang refuses to flush its cache while requests stay in place. A gserver with a stage drops outdated entries.
        flush = not staged and self._pause_mode != "in_place"
        if isinstance(weights, Broadcast):
            for number, bucket in enumerate(weights.buckets, start=1):
                last = number == len(weights.buckets)
                await self._calls.receive(
                    gserver, bucket, group=self.group.name, label=label, flush_cache=flush and last
                )
                self._received[gserver] = number
        elif weights.adapter and not staged:
            await self._calls.load_adapter(gserver, weights.folder, name=_adapter(self.version))
        else:
            if not staged:
                await self._calls.wait_until_idle(gserver)  # SGLang's front end breaks down when two loads overlap
            await self._calls.load(gserver, weights.folder, label=label, flush_cache=flush)

    def _label(self, version: int) -> str:
        return self._ledger.lineage.label(version)

    def _meaning(self, label: str) -> Serves:
        """Return whether `label` stands for the old weights, the new ones, or others."""
        if serves(label, self._label(self.version)):
            return "new"
        return "old" if serves(label, self._label(self._old_version)) else "other"


def _way(weights: Broadcast | Snapshot) -> Way:
    if isinstance(weights, Broadcast):
        return "broadcast"
    return "adapter" if weights.adapter else "snapshot"


def _adapter(version: int) -> str:
    name = adapter_name(version)
    assert name is not None, "the first version that is published is 1"
    return name


def _health_of(error: Exception) -> MemberHealth:
    if isinstance(error, PeerLost):
        return MemberHealth.LOST
    return MemberHealth.SLOW if isinstance(error, DeadlineExceeded) else MemberHealth.REFUSED
