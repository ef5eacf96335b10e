"""One gserver: its record, the state machine of its life, and how much work it has.

The record is the one that the registry has of the process; everybody else (routing, checks, weight updates, resync,
status) reads its `state` and tells it what happened (`Gserver.handle`). Which state follows is decided here alone, by
`TRANSITIONS`; docs/manager.md draws them, and a test compares the two. Pure, no I/O.

    joins        FOUND_CURRENT, UPDATED
    ──▶ UNCHECKED ──────────────────────▶ SERVING
         ▲   │  ▲                          │  │ ▲
         │   │  └───── UNREACHABLE ────────┘  │ │ UPDATED
         │   │ FOUND_OUTDATED, UPDATE_FAILED  │ │
         │   └───────────▶ EVICTED ◀──────────┘ │
         │                  │  └────────────────┘
         │                  │  PASSED_OVER, UPDATE_FAILED
         │ RETURNED         ▼ FELL_SILENT (from each of the three)
         └─────────────── SILENT

Beside that, one that was asked to leave (`draining`) is given no group; once it is EMPTIED it is LEAVING, and GONE when
it has left or when another process has its place.

Invariants: groups are given to SERVING gservers that do not drain, and to no others; GONE is final; whoever is
silent has to be checked before it serves again.

Its load: the manager counts what it has routed to a gserver; heartbeats tell what really runs and waits there. Between
two heartbeats the estimate is what was measured plus what was routed since. Invariant: the estimate never exceeds what
is routed there, and what was routed a moment before a measurement is not forgotten by it. Times, in seconds, are
passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from streamrl.gserver.manager.registry import Member
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION, ServerInfo

UNSEEN_SECONDS = 0.5
"""What was routed so shortly before a measurement may not have reached the gserver yet."""
AHEAD = 0.25
"""Share of its capacity that a gserver may have waiting, so that no slot is empty while the manager hears of it."""
SPEED_GAIN = 0.3
"""Weight of a new measurement of speed."""
COMPARABLE = 0.8
"""A measurement at this share of the earlier concurrency measures the same thing: it may lower the speed."""
FORGET = 0.99
"""Factor on the concurrency of the speed with each measurement at a lower one, so that an old one fades."""
LEAST_BUSY_SECONDS = 0.05
"""Less computing between two heartbeats says nothing about speed."""


# --- states ---


class GserverState(Enum):
    """What the manager knows about a gserver."""

    UNCHECKED = "unchecked"
    """Registered; what it serves is not known, or not any more. It is checked."""
    SERVING = "serving"
    """Serves the current weights: takes groups."""
    EVICTED = "evicted"
    """Serves other weights, or failed in a weight update: waits until it has the current ones."""
    SILENT = "silent"
    """Nothing was heard of it for too long, or it said that it gives up."""
    LEAVING = "leaving"
    """Was drained and has no work left: it only has to be told to leave."""
    LEAVING_SILENT = "leaving, silent"
    """Fell silent while it was leaving."""
    GONE = "gone"
    """Has left, or another process has its place."""


class GserverEvent(Enum):
    """What can happen to a gserver."""

    FOUND_CURRENT = "found current"
    """A check found that it serves the current weights."""
    FOUND_OUTDATED = "found outdated"
    """A check found that it serves other weights."""
    UNREACHABLE = "unreachable"
    """It did not reply to a check, or its generation could not be resumed."""
    UPDATED = "updated"
    """A weight update or a resync has brought it to the current weights."""
    UPDATE_FAILED = "update failed"
    """A weight update or a resync failed on it."""
    PASSED_OVER = "passed over"
    """Others serve newer weights now, which did not go to it."""
    FELL_SILENT = "fell silent"
    RETURNED = "returned"
    """It is heard of again after silence."""
    EMPTIED = "emptied"
    """Nothing is left to do on one that drains."""
    REMOVED = "removed"
    """It has left, or another process has taken its place."""


_STATE, _EVENT = GserverState, GserverEvent

TRANSITIONS: dict[GserverEvent, dict[GserverState, GserverState]] = {
    _EVENT.FOUND_CURRENT: {_STATE.UNCHECKED: _STATE.SERVING},
    _EVENT.FOUND_OUTDATED: {_STATE.UNCHECKED: _STATE.EVICTED},
    _EVENT.UNREACHABLE: {_STATE.SERVING: _STATE.UNCHECKED},
    _EVENT.UPDATED: {_STATE.UNCHECKED: _STATE.SERVING, _STATE.EVICTED: _STATE.SERVING},
    _EVENT.UPDATE_FAILED: {_STATE.UNCHECKED: _STATE.EVICTED, _STATE.SERVING: _STATE.EVICTED},
    _EVENT.PASSED_OVER: {_STATE.SERVING: _STATE.EVICTED},
    _EVENT.FELL_SILENT: {
        _STATE.UNCHECKED: _STATE.SILENT,
        _STATE.SERVING: _STATE.SILENT,
        _STATE.EVICTED: _STATE.SILENT,
        _STATE.LEAVING: _STATE.LEAVING_SILENT,
    },
    _EVENT.RETURNED: {_STATE.SILENT: _STATE.UNCHECKED, _STATE.LEAVING_SILENT: _STATE.LEAVING},
    _EVENT.EMPTIED: {
        _STATE.UNCHECKED: _STATE.LEAVING,
        _STATE.SERVING: _STATE.LEAVING,
        _STATE.EVICTED: _STATE.LEAVING,
        _STATE.SILENT: _STATE.LEAVING_SILENT,
    },
    _EVENT.REMOVED: {state: _STATE.GONE for state in _STATE if state is not _STATE.GONE},
}
"""What happens → state → the state that follows; in a state that is not named it changes nothing."""


def next_state(state: GserverState, event: GserverEvent) -> GserverState:
    """Return the state of a gserver in `state` after `event`."""
    return TRANSITIONS[event].get(state, state)


# --- load ---


class Work(NamedTuple):
    """What one group, or one prompt of an evaluation, has in flight."""

    requests: int
    tokens: int
    """Sum of the contexts of these requests."""


NO_WORK = Work(0, 0)


class GserverLoad:
    """Estimated load, measured speed and known capacity of one gserver."""

    def __init__(self) -> None:
        self.routed = NO_WORK
        """Everything that is routed to it and still in flight."""
        self.most_requests = 0
        """How many requests it runs together; 0: not known."""
        self.most_tokens = 0
        """How many tokens its cache holds; 0: not known."""
        self.speed: float | None = None
        """Tokens per second of computing, at the highest concurrency of late; None: not measured yet."""
        self._speed_concurrency = 0.0
        self._measured: float | None = None  # requests there at the last heartbeat, and what changed since
        self._measured_tokens: float | None = None  # mean context of a request at the last heartbeat
        self._recent: deque[tuple[float, int]] = deque()  # when how many requests were routed there lately
        self._totals: tuple[float, float, float] | None = None  # tokens, busy seconds, slot seconds

    @property
    def requests(self) -> float:
        """Requests that run or wait there, as far as is known."""
        if self._measured is None:
            return self.routed.requests
        return min(self.routed.requests, max(0.0, self._measured))

    @property
    def tokens_per_request(self) -> float:
        """Mean context of a request there."""
        if self._measured_tokens is not None:
            return self._measured_tokens
        return self.routed.tokens / self.routed.requests if self.routed.requests else 0.0

    @property
    def full(self) -> bool:
        """Whether further work has to wait for capacity. A gserver that has nothing takes anything."""
        requests = self.requests
        if requests == 0:
            return False
        too_many = bool(self.most_requests) and requests >= self.most_requests * (1 + AHEAD)
        return too_many or (bool(self.most_tokens) and requests * self.tokens_per_request >= self.most_tokens)

    def size(self, mean_tokens: float) -> float:
        """Load in requests of average size: half by their number, half by their tokens.

        `mean_tokens`: mean context of a request on any gserver.
        """
        requests = self.requests
        return requests * (1 + self.tokens_per_request / mean_tokens) / 2 if mean_tokens else requests

    def change(self, before: Work, after: Work, *, now: float) -> None:
        """Note that a group which had `before` in flight here has `after` now."""
        more = after.requests - before.requests
        self.routed = Work(self.routed.requests + more, self.routed.tokens + after.tokens - before.tokens)
        if self._measured is not None:
            self._measured += more
        if more > 0:
            self._recent.append((now, more))
            self._forget_recent(now)

    def measure(self, stats: Mapping[str, float], *, now: float) -> None:
        """Take in the `stats` of a heartbeat; names that are missing change nothing."""
        if "running" in stats:
            self._forget_recent(now)
            running, unseen = stats["running"], sum(requests for _, requests in self._recent)
            self._measured = running + stats.get("queued", 0.0) + unseen
            if "running_tokens" in stats and running > 0:
                self._measured_tokens = stats["running_tokens"] / running
        if {"tokens_generated_total", "busy_seconds_total", "slot_seconds_total"} <= stats.keys():
            self._measure_speed(
                stats["tokens_generated_total"], stats["busy_seconds_total"], stats["slot_seconds_total"]
            )

    def _measure_speed(self, *totals: float) -> None:
        before = self._totals
        if before is not None:
            tokens, busy, slots = (new - old for new, old in zip(totals, before, strict=True))
            if 0 <= busy < LEAST_BUSY_SECONDS:
                return
            if busy > 0 and tokens >= 0:
                self._learn_speed(tokens / busy, slots / busy)
        self._totals = totals[0], totals[1], totals[2]

    def _learn_speed(self, speed: float, concurrency: float) -> None:
        if self.speed is None:
            self.speed, self._speed_concurrency = speed, concurrency
        elif speed > self.speed or concurrency >= COMPARABLE * self._speed_concurrency:
            self.speed += SPEED_GAIN * (speed - self.speed)
            self._speed_concurrency += SPEED_GAIN * (concurrency - self._speed_concurrency)
        else:
            self._speed_concurrency *= FORGET

    def _forget_recent(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - UNSEEN_SECONDS:
            self._recent.popleft()


# --- the record ---


class Route:
    """Where the requests of one group, or of one prompt of an evaluation, go; changed by the fleet alone."""

    __slots__ = ("gserver", "work")

    def __init__(self, gserver: Gserver, work: Work) -> None:
        self.gserver = gserver
        self.work = work
        """What it has in flight there."""


def serves(label: str, wanted: str) -> bool:
    """Whether a gserver that calls its weights `label` serves the weights called `wanted`; a server that was started
    with the run's first weights calls them `default`."""
    return label == wanted or (wanted == "0" and label == INITIAL_WEIGHT_VERSION)


class Gserver(Member):
    """One registered gserver process; a restarted one is another `Gserver`."""

    def __init__(self, index: int, address: str, **facts: Any) -> None:
        """`facts`: as of a `Member`."""
        super().__init__("gserver", index, address, **facts)
        self.state = GserverState.UNCHECKED
        """Changes by `handle` alone."""
        self.on_change: Callable[[Gserver], None] = lambda gserver: None
        """Called after changes that routing depends on; set by the fleet that it joins."""
        self.routes: set[Route] = set()
        """Groups and prompts of evaluations that were routed to it and are still in flight."""
        self.load = GserverLoad()
        self.stuck = False
        """Its generation was paused and could not be resumed."""
        self.unreachable = False
        """It did not reply when it was asked last: it is asked again, beside everything else, when it is heard of."""
        self.failed_version: int | None = None
        """The last weight update that failed because of it."""
        self.failed_resyncs = 0
        """How often in a row it could not be resynced to the current weights, though it lived on."""
        self.resync_failed = False
        """Its last resync failed, and it has not been heard of since: it may have died of it."""
        self.overtaken_resyncs = 0
        """How often it was resynced to weights that were no longer the current ones, since it last took part in an
        update."""
        self.tells_received = True
        """Whether one that stages no weights can tell checksums of those that came, as far as known."""
        self.adapters: dict[str, float] = {}
        """Name → when requests began to name another one, by the monotonic clock (inf: not yet), of the adapters that
        an SGLang server has loaded beside its model."""
        self._info: ServerInfo | None = None

    def handle(self, event: GserverEvent) -> None:
        """Change its state, now that `event` has happened."""
        state = next_state(self.state, event)
        if state is not self.state:
            self.state = state
            self.on_change(self)

    @property
    def serving(self) -> bool:
        """Whether it serves the current weights."""
        return self.state is GserverState.SERVING

    @property
    def evicted(self) -> bool:
        """Whether it waits for the current weights."""
        return self.state is GserverState.EVICTED

    @property
    def takes_groups(self) -> bool:
        """Whether it may be given groups when it has capacity."""
        return self.serving and not self.draining

    @property
    def silent(self) -> bool:
        """Whether nothing was heard of it for too long, or it gave up."""
        return self.state in (GserverState.SILENT, GserverState.LEAVING_SILENT)

    def fall_silent(self) -> None:
        self.handle(GserverEvent.FELL_SILENT)

    def return_from_silence(self) -> None:
        self.handle(GserverEvent.RETURNED)

    def drain(self) -> None:
        """It is asked to leave: it finishes what it has, still takes weights, and is given nothing more."""
        super().drain()
        self.on_change(self)

    def remove(self) -> None:
        self.handle(GserverEvent.REMOVED)

    def clear_failures(self) -> None:
        """Forget failed resyncs: they were to another version."""
        self.failed_resyncs = 0
        self.resync_failed = False

    @property
    def info(self) -> ServerInfo | None:
        """What it can do, once it was asked."""
        return self._info

    @info.setter
    def info(self, info: ServerInfo) -> None:
        self._info = info
        self.unreachable = False
        self.load.most_requests = info.max_running_requests or 0
        self.load.most_tokens = info.max_total_num_tokens or 0
        self.on_change(self)

    @property
    def ranks(self) -> int:
        """How many ranks it takes in a weight group."""
        return self._info.tp_size if self._info is not None else 1
