"""One attempt to bring new weights to the gservers of a weight group: a transaction.

Every gserver joins the group, begins, and receives bucket after bucket while the publisher broadcasts
them. After the publisher's commit each gserver on its own pauses, swaps and resumes. Gservers that
cannot stage (real SGLang) write buckets straight into their weights: they pause before they begin.

Invariants: until the first swap succeeds, every failure rolls back, and gservers that hold unmixed
weights go on at the old version; from then on the update stands, and a gserver that fails is evicted.
Every call has a deadline. Whoever was paused is resumed, whatever happens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from streamrl.config import WeightsConfig
from streamrl.errors import DeadlineExceeded, PeerLost, PublicationError, StreamRLError
from streamrl.gserver.blame import Seen, culprits
from streamrl.gserver.routing import Gserver, Standing
from streamrl.gserver.weight_calls import WeightCalls
from streamrl.transport.control.publication import PublishBegin, PublishReply
from streamrl.transport.generation import InitWeightsUpdateGroup

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""After a first failure the others have so long to show how they fare, to tell cause from effect."""
CLOSING_SECONDS = 2.0
"""For each gserver to be resumed when the manager itself leaves."""


class Stage(Enum):
    """How far an update is; in the order of an update that succeeds."""

    IDLE = "idle"
    FORMING = "forming"
    TRANSFERRING = "transferring"
    WAITING_COMMIT = "waiting_commit"
    PAUSING = "pausing"
    SWAPPING = "swapping"
    RESUMING = "resuming"
    DONE = "done"
    ROLLED_BACK = "rolled_back"


_ORDER = list(Stage)


@dataclass(eq=False)
class WeightGroup:
    """A process group of the publisher (rank 0) and `members` (ranks from 1, in this order)."""

    name: str
    members: tuple[Gserver, ...]
    formed: bool = False
    broken: bool = False

    @property
    def world_size(self) -> int:
        return len(self.members) + 1


class UpdateRecord(msgspec.Struct, kw_only=True):
    """What happened in one attempt; times in seconds since the epoch."""

    version: int
    group: str
    gservers: list[int]
    begin: float
    reached: dict[str, float] = {}
    """Stage → when all gservers had reached it."""
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
        message: PublishBegin,
        old_version: int,
        group: WeightGroup,
        calls: WeightCalls,
        config: WeightsConfig,
        on_swapped: Callable[[int], None],
    ) -> None:
        self.version = message.version
        self.group = group
        self.record = UpdateRecord(
            version=message.version, group=group.name, gservers=[g.index for g in group.members], begin=time.time()
        )
        self._message = message
        self._old_version = old_version
        self._calls = calls
        self._config = config
        self._on_swapped = on_swapped
        self._resume_timeout = config.timeout_seconds
        self._stages = dict.fromkeys(group.members, Stage.FORMING)
        self._final: Stage | None = None
        self._seen = dict.fromkeys(group.members, Seen.FINE)
        self._said: dict[Gserver, str] = {}
        self._committed = asyncio.Event()
        self._aborted = asyncio.Event()
        self._abort_reason = ""
        self._paused_at: dict[Gserver, float] = {}
        self._mixed: set[Gserver] = set()
        self._swapped: list[Gserver] = []
        self._evicted: list[Gserver] = []

    @property
    def stage(self) -> Stage:
        """Of the update: that of the gserver furthest behind."""
        return self._final or min(self._stages.values(), key=_ORDER.index)

    def status(self) -> dict[str, Any]:
        """For people."""
        return {
            "state": self.stage.value,
            "version": self.version,
            "group": self.group.name,
            "gservers": {g.name: stage.value for g, stage in self._stages.items()},
        }

    def commit(self, error: str) -> None:
        """The publisher has sent everything, or failed with `error`."""
        if error:
            self.abort(f"the publisher failed: {error}")
        else:
            self._committed.set()

    def abort(self, reason: str) -> None:
        """Roll back, unless the publisher had committed before."""
        if not self._committed.is_set():
            self._abort_reason = self._abort_reason or reason
            self._aborted.set()

    def hurry(self) -> None:
        """Keep the clean-up short: the manager is leaving."""
        self._resume_timeout = min(self._resume_timeout, CLOSING_SECONDS)

    async def run(self) -> PublishReply:
        """The whole transaction; answers what the publisher is told."""
        try:
            try:
                await self._receive_everywhere()
                await self._await_commit()
            except PublicationError as error:
                await self._roll_back(str(error))
            else:
                await self._swap_everywhere()
        finally:
            await self._resume(list(self._paused_at))
            self._final = Stage.DONE if self.record.done else Stage.ROLLED_BACK
            self.record.end = time.time()
            self.record.evicted = sorted(g.index for g in self._evicted)
        return PublishReply(
            done=self.record.done,
            error=self.record.error,
            pause_seconds=self.record.pause_seconds,
            evicted=self.record.evicted,
        )

    async def _receive_everywhere(self) -> None:
        """All gservers up to their last bucket; the first failure, or the publisher's, ends it."""
        tasks = [asyncio.create_task(self._receive(g), name=f"weights to {g.name}") for g in self._stages]
        aborted = asyncio.create_task(self._aborted.wait())
        pending: set[asyncio.Task[Any]] = set(tasks)
        try:
            while pending and not self._said and not self._aborted.is_set():
                done, _ = await asyncio.wait({*pending, aborted}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                for task in done:
                    task.result()
            if self._said and pending:
                await asyncio.wait(pending, timeout=min(GRACE_SECONDS, self._config.timeout_seconds))
        finally:
            for task in (*tasks, aborted):
                task.cancel()
            await asyncio.gather(*tasks, aborted, return_exceptions=True)
        if self._aborted.is_set():
            raise PublicationError(self._abort_reason)
        if self._said:
            raise PublicationError("; ".join(self._said.values()))
        self.group.formed = True

    async def _receive(self, gserver: Gserver) -> None:
        try:
            if not self.group.formed:
                await self._form(gserver)
            if not _stages_weights(gserver):
                await self._pause(gserver)
            await self._calls.begin(gserver)
            self._advance(gserver, Stage.TRANSFERRING)
            await self._receive_buckets(gserver)
            self._advance(gserver, Stage.WAITING_COMMIT)
        except StreamRLError as error:
            self._seen[gserver] = _classify(error)
            self._said[gserver] = f"{gserver.name} while {self._stages[gserver].value}: {error}"

    async def _form(self, gserver: Gserver) -> None:
        message = InitWeightsUpdateGroup(
            master_address=self._message.master_address,
            master_port=self._message.master_port,
            rank_offset=self.group.members.index(gserver) + 1,
            world_size=self.group.world_size,
            group_name=self.group.name,
            backend=self._message.backend,
        )
        await self._calls.join_group(gserver, message)

    async def _receive_buckets(self, gserver: Gserver) -> None:
        staged = _stages_weights(gserver)
        # SGLang refuses to flush its cache while requests stay in place.
        flush = not staged and self._config.pause_mode != "in_place"
        last = len(self._message.buckets)
        for number, bucket in enumerate(self._message.buckets, start=1):
            if not staged:
                self._mixed.add(gserver)
            await self._calls.receive(
                gserver,
                bucket,
                group=self.group.name,
                version=self.version,
                flush_cache=flush and number == last,
            )

    async def _await_commit(self) -> None:
        timeout = self._config.timeout_seconds
        events = [asyncio.create_task(event.wait()) for event in (self._committed, self._aborted)]
        try:
            await asyncio.wait(events, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
            await asyncio.gather(*events, return_exceptions=True)
        if not self._committed.is_set():
            self.abort(f"the publisher did not commit within {timeout:g} s after the last bucket arrived")
            raise PublicationError(self._abort_reason)

    async def _swap_everywhere(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for gserver in self._stages:
                tasks.create_task(self._swap(gserver), name=f"swap on {gserver.name}")
        if self._swapped:
            for gserver in self._said:
                self._evict(gserver)
            self.record.done = True
        else:
            await self._roll_back("; ".join(self._said.values()))

    async def _swap(self, gserver: Gserver) -> None:
        """Pause, swap, resume one gserver; what fails here concerns it alone."""
        try:
            if gserver not in self._paused_at:
                self._advance(gserver, Stage.PAUSING)
                await self._pause(gserver)
            self._advance(gserver, Stage.SWAPPING)
            await self._calls.end(gserver)
            self._mixed.discard(gserver)
            self._has_swapped(gserver)
        except StreamRLError as error:
            # A lost answer is no failure: the label tells whether the swap took place.
            if _stages_weights(gserver) and await self._calls.serves(gserver, self.version):
                self._has_swapped(gserver)
            else:
                self._seen[gserver] = _classify(error)
                self._said[gserver] = f"{gserver.name} while {self._stages[gserver].value}: {error}"
        finally:
            self._advance(gserver, Stage.RESUMING)
            await self._resume([gserver])
        self._advance(gserver, Stage.DONE)

    def _has_swapped(self, gserver: Gserver) -> None:
        self._swapped.append(gserver)
        if len(self._swapped) == 1:
            self._on_swapped(self.version)
        if gserver.standing is not Standing.SILENT:
            gserver.standing = Standing.SERVING

    async def _roll_back(self, reason: str) -> None:
        """Leave the old version standing: resume whom it can be kept on, evict whom it cannot."""
        self.group.broken = True
        self.record.error = reason
        answers = await asyncio.gather(*(self._calls.lives(g) for g in self._stages))
        for gserver, answered in zip(self._stages, answers, strict=True):
            if not answered:
                self._seen[gserver] = Seen.LOST
        for gserver in culprits(self._seen, publisher_failed=self._aborted.is_set()) | self._mixed:
            self._evict(gserver)
        await self._resume(list(self._paused_at))
        if self._committed.is_set():  # a swap was tried: trust nobody's word but the label
            labels = await asyncio.gather(*(self._calls.serves(g, self._old_version) for g in self._stages))
            for gserver, kept in zip(self._stages, labels, strict=True):
                if not kept:
                    self._evict(gserver)

    async def _pause(self, gserver: Gserver) -> None:
        self._paused_at[gserver] = time.monotonic()
        await self._calls.pause(gserver, self._config.pause_mode)

    async def _resume(self, gservers: Iterable[Gserver]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for gserver in gservers:
                if gserver in self._paused_at:
                    tasks.create_task(self._resume_one(gserver, since=self._paused_at.pop(gserver)))

    async def _resume_one(self, gserver: Gserver, *, since: float) -> None:
        try:
            if gserver in self._mixed:  # its requests must not go on under weights of two versions
                await self._calls.abort_requests(gserver, timeout=self._resume_timeout)
        except StreamRLError as error:
            log.warning("%s: requests could not be aborted: %s", gserver.name, error)
        try:
            await self._calls.resume(gserver, timeout=self._resume_timeout)
        except StreamRLError as error:
            log.warning("%s could not be resumed and takes no groups until it can: %s", gserver.name, error)
            gserver.stuck = True
            if gserver.standing is Standing.SERVING:
                gserver.standing = Standing.UNCHECKED
        else:
            self.record.pause_seconds = max(self.record.pause_seconds, time.monotonic() - since)

    def _evict(self, gserver: Gserver) -> None:
        gserver.failed_version = self.version
        if gserver.standing is not Standing.SILENT:
            gserver.standing = Standing.EVICTED
        if gserver not in self._evicted:
            self._evicted.append(gserver)

    def _advance(self, gserver: Gserver, stage: Stage) -> None:
        before = self.stage
        self._stages[gserver] = stage
        if self.stage is not before:
            self.record.reached[self.stage.value] = time.time()


def _stages_weights(gserver: Gserver) -> bool:
    return gserver.info is not None and gserver.info.staged_weight_update


def _classify(error: StreamRLError) -> Seen:
    if isinstance(error, PeerLost):
        return Seen.LOST
    return Seen.LATE if isinstance(error, DeadlineExceeded) else Seen.REFUSED
