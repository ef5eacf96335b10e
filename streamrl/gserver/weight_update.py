"""One attempt to bring new weights to gservers: takes the steps that `update_states.py` decides on.

Invariants: every call has a deadline; a step that does not matter any more is cut off; `run` ends only after
everyone who was paused was asked to resume. What an update *is* stands in `update_states.py`.
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
from streamrl.config import WeightsConfig
from streamrl.errors import DeadlineExceeded, PeerLost, StreamRLError
from streamrl.gserver.blame import Seen
from streamrl.gserver.routing import Gserver, Standing, serves
from streamrl.gserver.update_states import ORDER, Do, Serves, Stage, Step, UpdateStates, plan_for
from streamrl.gserver.weight_calls import WeightCalls
from streamrl.transport.control.publication import Broadcast, PublishReply, Snapshot
from streamrl.transport.generation import MIXED_WEIGHTS, InitWeightsUpdateGroup

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""After a first failure the others have so long to show how they fare, to tell cause from effect."""
CLOSING_SECONDS = 2.0
"""For each gserver to be resumed when the manager itself leaves."""


@dataclass(eq=False)
class WeightGroup:
    """Who takes part: `members`. Where weights are broadcast, a process group with the publisher as rank 0 and
    their ranks from 1 on, in this order."""

    name: str
    members: tuple[Gserver, ...]
    formed: bool = False
    broken: bool = False

    @property
    def world_size(self) -> int:
        return 1 + sum(gserver.ranks for gserver in self.members)

    def first_rank(self, gserver: Gserver) -> int:
        """Of those that this member has in the group."""
        return 1 + sum(before.ranks for before in self.members[: self.members.index(gserver)])


class UpdateRecord(msgspec.Struct, kw_only=True):
    """What happened in one attempt; times in seconds since the epoch."""

    version: int
    group: str
    gservers: list[int]
    begin: float
    reached: dict[str, float] = {}
    """Stage → when all gservers had reached it, or one beyond it."""
    end: float = 0.0
    pause_seconds: float = 0.0
    """Longest pause of generation on any gserver."""
    done: bool = False
    error: str = ""
    evicted: list[int] = []


class WeightUpdate:
    """Carries one update through; `run` it once."""

    def __init__(
        self,
        *,
        version: int,
        old_version: int,
        weights: Broadcast | Snapshot,
        group: WeightGroup,
        calls: WeightCalls,
        config: WeightsConfig,
        on_swapped: Callable[[int], None],
        current: Callable[[], int],
    ) -> None:
        """`on_swapped` hears the version as soon as the first gserver serves it. `current` tells the version that
        gservers have to serve to be given groups; it may grow beyond this one before this update ends."""
        self.version = version
        self.group = group
        self.record = UpdateRecord(
            version=version, group=group.name, gservers=[g.index for g in group.members], begin=time.time()
        )
        self.checksums: dict[str, str] = {}
        """Of the weights as they were trained, by name; known from the commit on."""
        self._old_version = old_version
        self._weights = weights
        self._calls = calls
        self._config = config
        self._on_swapped = on_swapped
        self._current = current
        self._states: UpdateStates[Gserver] = UpdateStates(
            {
                gserver: plan_for(
                    way="broadcast" if isinstance(weights, Broadcast) else "snapshot",
                    staged=_stages_weights(gserver),
                    joined=group.formed,
                    verified=config.checksum,
                )
                for gserver in group.members
            }
        )
        self._resume_timeout = config.timeout_seconds
        self._tasks: dict[Do[Gserver], asyncio.Task[None]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_for = ""
        self._paused_at: dict[Gserver, float] = {}
        self._in_force = False
        self._ended = asyncio.Event()

    @property
    def lost(self) -> bool:
        """Whether a gserver did not answer at all."""
        return self._states.lost

    def status(self) -> dict[str, Any]:
        """For people."""
        return {
            "state": self._states.stage.value,
            "version": self.version,
            "group": self.group.name,
            "gservers": {g.name: stage.value for g, stage in self._states.stages().items()},
        }

    def commit(self, error: str, checksums: dict[str, str]) -> None:
        """The publisher has brought everything, or failed with `error`."""
        if error:
            self.abort(f"the publisher failed: {error}")
        elif not self._ended.is_set():
            self.checksums = self.checksums or checksums
            self._take(self._states.commit())

    def abort(self, reason: str) -> None:
        """Roll back, unless the publisher had committed before."""
        self._take(self._states.abort(reason))

    def leave(self) -> None:
        """The manager is leaving: resume whom this update has paused, and end."""
        self._resume_timeout = min(self._resume_timeout, CLOSING_SECONDS)
        self._take(self._states.leave("the manager leaves"))

    async def run(self) -> PublishReply:
        """The whole transaction; answers what the publisher is told."""
        self._take(self._states.start())
        await self._ended.wait()
        return PublishReply(
            done=self.record.done,
            error=self.record.error,
            pause_seconds=self.record.pause_seconds,
            evicted=self.record.evicted,
        )

    def _take(self, steps: Iterable[Do[Gserver]]) -> None:
        """Set off `steps`, cut off those that do not matter any more, and note how far the update is."""
        for do in steps:
            self._tasks[do] = essential.begin(self._carry_out(do), name=f"{do.step.value} on {do.who.name}")
        outstanding = set(self._states.outstanding)
        for do in [do for do in self._tasks if do not in outstanding]:
            task = self._tasks.pop(do)
            if task is not asyncio.current_task():
                task.cancel()
        self._note()
        self._watch_the_clock()

    def _note(self) -> None:
        self._note_stage(self._states.stage)
        if self._states.phase.value not in ("prepare", "ended") and not self.record.error:
            self.group.formed = True
        if self._states.done and not self._in_force:
            self._in_force = True
            self._on_swapped(self.version)
        for gserver in self._states.swapped if self.version == self._current() else ():
            if gserver.standing is not Standing.SILENT and not gserver.stuck:
                gserver.standing = Standing.SERVING
        self.record.error = self._states.reason
        if self.record.error:
            self.group.broken = True
        if self._states.ended and not self._ended.is_set():
            self._conclude()

    def _note_stage(self, stage: Stage) -> None:
        passed = [stage] if stage is Stage.ROLLED_BACK else [s for s in Stage if ORDER[s] <= ORDER[stage]]
        for reached in passed:
            if reached is not Stage.IDLE:
                self.record.reached.setdefault(reached.value, time.time())

    def _conclude(self) -> None:
        for gserver in self._states.evicted:
            if gserver.standing is not Standing.SILENT:
                gserver.standing = Standing.EVICTED
        for gserver in self._states.blamed:
            gserver.failed_version = self.version
        self.record.done = self._states.done
        self.record.end = time.time()
        self.record.evicted = sorted(g.index for g in self._states.evicted)
        self._ended.set()

    def _watch_the_clock(self) -> None:
        awaits = self._states.awaits
        if awaits == self._alarm_for:
            return
        self._alarm_for = awaits
        if self._alarm is not None:
            self._alarm.cancel()
        limit = self._config.timeout_seconds
        seconds = limit if awaits == "commit" else min(GRACE_SECONDS, limit)
        reason = f"the publisher did not commit within {limit:g} s after the last gserver was ready"
        if awaits:
            self._alarm = asyncio.get_running_loop().call_later(
                seconds, lambda: self._take(self._states.overdue(reason))
            )

    async def _carry_out(self, do: Do[Gserver]) -> None:
        """One step, and what it leads to."""
        gserver = do.who
        try:
            if do.step is Step.ASK:
                answer = self._meaning(await self._calls.label(gserver))
                self._take(self._states.serves(do, answer))
                return
            await self._call(do.step, gserver)
        except Exception as error:  # tolerance point: whatever happens in a step, the update comes to its end
            if not isinstance(error, StreamRLError):
                log.exception("%s on %s failed", do.step.value, gserver.name)
            self._failed(do, error)
            return
        if do.step is Step.RESUME:
            gserver.stuck = False
            now = time.monotonic()
            since = self._paused_at.pop(gserver, now)  # now: cut off before its pause was asked for
            self.record.pause_seconds = max(self.record.pause_seconds, now - since)
        self._take(self._states.succeeded(do))

    def _failed(self, do: Do[Gserver], error: Exception) -> None:
        gserver = do.who
        if do.step is Step.RESUME:
            log.warning("%s could not be resumed and takes no groups until it can: %s", gserver.name, error)
            gserver.stuck = True
            if gserver.standing is Standing.SERVING:
                gserver.standing = Standing.UNCHECKED
        elif do.step is Step.CLEAR:
            log.warning("%s: requests could not be aborted: %s", gserver.name, error)
        stage = self._states.stages()[gserver].value
        self._take(self._states.failed(do, _classify(error), f"{gserver.name} while {stage}: {error}"))

    async def _call(self, step: Step, gserver: Gserver) -> None:
        match step:
            case Step.JOIN:
                await self._join(gserver)
            case Step.BEGIN:
                await self._calls.begin(gserver)
            case Step.RECEIVE:
                await self._receive(gserver)
            case Step.VERIFY:
                await self._calls.verify(gserver, self.checksums)
            case Step.PAUSE:
                self._paused_at[gserver] = time.monotonic()
                await self._calls.pause(gserver, self._config.pause_mode)
                if self._config.pause_mode == "abort" and not _stages_weights(gserver):
                    # SGLang has answered its requests, but may still run them, and would not flush its cache.
                    await self._calls.pause(gserver, "retract")
            case Step.MARK:
                await self._calls.name(gserver, MIXED_WEIGHTS)
            case Step.SWAP if _stages_weights(gserver):
                await self._calls.end(gserver)
            case Step.SWAP:
                if isinstance(self._weights, Broadcast):
                    await self._calls.end(gserver)
                await self._calls.name(gserver, str(self.version))
            case Step.CLEAR:
                await self._calls.abort_requests(gserver, timeout=self._resume_timeout)
            case Step.RESUME:
                await self._calls.resume(gserver, timeout=self._resume_timeout)

    async def _join(self, gserver: Gserver) -> None:
        assert isinstance(self._weights, Broadcast)
        message = InitWeightsUpdateGroup(
            master_address=self._weights.master_address,
            master_port=self._weights.master_port,
            rank_offset=self.group.first_rank(gserver),
            world_size=self.group.world_size,
            group_name=self.group.name,
            backend=self._weights.backend,
        )
        await self._calls.join_group(gserver, message)

    async def _receive(self, gserver: Gserver) -> None:
        if isinstance(self._weights, Snapshot):
            await self._load(gserver, self._weights)
            return
        last = len(self._weights.buckets)
        for number, bucket in enumerate(self._weights.buckets, start=1):
            await self._calls.receive(
                gserver,
                bucket,
                group=self.group.name,
                version=self.version if _stages_weights(gserver) else None,
                flush_cache=self._flushes(gserver) and number == last,
            )

    async def _load(self, gserver: Gserver, files: Snapshot) -> None:
        if not _stages_weights(gserver):
            await self._calls.settle(gserver)  # SGLang's front end breaks down when two loads overlap
        await self._calls.load(
            gserver,
            files.folder,
            version=self.version if _stages_weights(gserver) else None,
            flush_cache=self._flushes(gserver),
        )

    def _flushes(self, gserver: Gserver) -> bool:
        """SGLang refuses to flush its cache while requests stay in place; a swap of staged weights needs no word."""
        return not _stages_weights(gserver) and self._config.pause_mode != "in_place"

    def _meaning(self, label: str) -> Serves:
        if serves(label, self.version):
            return "new"
        return "old" if serves(label, self._old_version) else "other"


def _stages_weights(gserver: Gserver) -> bool:
    return gserver.info is not None and gserver.info.staged_weight_update


def _classify(error: Exception) -> Seen:
    if isinstance(error, PeerLost):
        return Seen.LOST
    return Seen.LATE if isinstance(error, DeadlineExceeded) else Seen.REFUSED
