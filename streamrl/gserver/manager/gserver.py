"""One gserver: its record, and how much work it has.

The record is the registry's record of the process, with the member's state (`registry.py`). Routing, checks,
weight updates, resync and status read its `state` and report events to it (`Gserver.handle`). Pure, no I/O.

The manager counts the requests that it has routed to a gserver; heartbeats report the requests that run or wait there.
Between two heartbeats the load estimate is the last measurement plus all requests routed since. Invariant: the estimate
never exceeds the number of requests routed there, and a measurement does not discard requests that were routed a moment
before it. Times, in seconds, are passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from streamrl.gserver.manager.registry import OUT, Member, MemberEvent, MemberState
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION, ServerInfo

UNSEEN_SECONDS = 0.5
"""Work routed within this time before a measurement may not have reached the gserver yet."""
AHEAD = 0.25
"""Share of its capacity that may wait at a gserver, so that no slot is empty before the manager learns of it."""
SPEED_GAIN = 0.3
"""Weight of a new measurement of speed."""
COMPARABLE = 0.8
"""A measurement at this share of the earlier concurrency or more is comparable: it may lower the speed."""
FORGET = 0.99
"""Factor on the concurrency of the speed at each measurement with a lower one, so that an old measurement fades."""
LEAST_BUSY_SECONDS = 0.05
"""Computing time between two heartbeats below which the speed is not measured."""


# --- load ---


class Work(NamedTuple):
    """The requests in flight of one group, or of one prompt of an evaluation."""

    requests: int
    tokens: int
    """Sum of the contexts of these requests, in tokens."""


NO_WORK = Work(0, 0)


class GserverLoad:
    """Estimated load, measured speed and known capacity of one gserver."""

    def __init__(self) -> None:
        self.routed = NO_WORK
        """All work that is routed to it and still in flight."""
        self.most_requests = 0
        """Number of requests that it runs together; 0: not known."""
        self.most_tokens = 0
        """Number of tokens that its cache holds; 0: not known."""
        self.speed: float | None = None
        """Tokens per second of computing, at the highest recent concurrency; None: not measured yet."""
        self._speed_concurrency = 0.0
        self._measured: float | None = None  # requests there at the last heartbeat, plus changes since
        self._measured_tokens: float | None = None  # mean context of a request at the last heartbeat
        self._recent: deque[tuple[float, int]] = deque()  # time and number of requests routed there lately
        self._totals: tuple[float, float, float] | None = None  # tokens, busy seconds, slot seconds

    @property
    def requests(self) -> float:
        """Estimate of the requests that run or wait there."""
        if self._measured is None:
            return self.routed.requests
        return min(self.routed.requests, max(0.0, self._measured))

    @property
    def tokens_per_request(self) -> float:
        """Mean context, in tokens, of a request there."""
        if self._measured_tokens is not None:
            return self._measured_tokens
        return self.routed.tokens / self.routed.requests if self.routed.requests else 0.0

    @property
    def full(self) -> bool:
        """Whether further work has to wait for capacity. A gserver without work is never full."""
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
        """Note that the work in flight here of one group has changed from `before` to `after`."""
        more = after.requests - before.requests
        self.routed = Work(self.routed.requests + more, self.routed.tokens + after.tokens - before.tokens)
        if self._measured is not None:
            self._measured += more
        if more > 0:
            self._recent.append((now, more))
            self._forget_recent(now)

    def measure(self, stats: Mapping[str, float], *, now: float) -> None:
        """Update the estimates from the `stats` of a heartbeat; missing names change nothing."""
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
    """The gserver of one group, or of one prompt of an evaluation, and its work there; changed by the fleet alone."""

    __slots__ = ("gserver", "work")

    def __init__(self, gserver: Gserver, work: Work) -> None:
        self.gserver = gserver
        self.work = work
        """The work in flight there."""


def serves(label: str, wanted: str) -> bool:
    """Whether a gserver that labels its weights `label` serves the weights labelled `wanted`.

    A server that was started with the run's first weights labels them `default`.
    """
    return label == wanted or (wanted == "0" and label == INITIAL_WEIGHT_VERSION)


class Gserver(Member):
    """One registered gserver process; a restarted one is another `Gserver`."""

    def __init__(self, index: int, address: str, **facts: Any) -> None:
        """`facts`: the keyword arguments of `Member`."""
        super().__init__("gserver", index, address, **facts)
        self.on_change: Callable[[Gserver], None] = lambda gserver: None
        """Called after changes that routing depends on; set by the fleet that it joins."""
        self.routes: set[Route] = set()
        """Groups and prompts of evaluations that were routed to it and are still in flight."""
        self.load = GserverLoad()
        self.failed_version: int | None = None
        """Version of the last weight update that failed because of this gserver."""
        self.failed_resyncs = 0
        """Number of consecutive failed resyncs to the current weights."""
        self.tells_received = True
        """Whether the gserver, if it stages no weights, can return checksums of received ones; True until disproved."""
        self.adapters: dict[str, float] = {}
        """Adapters that an SGLang server has loaded in addition to its model: name → time on the monotonic clock at
        which requests began to name another one (inf: not yet)."""
        self._info: ServerInfo | None = None

    def handle(self, event: MemberEvent) -> None:
        """Change its state, now that `event` has happened, and count failed resyncs in a row."""
        before = self.state
        super().handle(event)
        if event is MemberEvent.RESYNC_FAILED:
            self.failed_resyncs += 1
        if self.state is before:
            return
        if self.serving or event is MemberEvent.RETURNED:
            self.failed_resyncs = 0
        self.on_change(self)

    def forget_updates(self) -> None:
        """Forget failed updates, since the run has gone back; the gserver is checked before it takes groups again."""
        self.handle(MemberEvent.UNREACHABLE)
        self.failed_version = None
        self.failed_resyncs = 0

    @property
    def serving(self) -> bool:
        """Whether it takes groups, and hence serves the current weights."""
        return self.state is MemberState.SERVING

    @property
    def lacks_weights(self) -> bool:
        """Whether it serves other weights than the current ones, or may serve others."""
        return self.state in (MemberState.EVICTED, MemberState.SUSPECT)

    @property
    def takes_part(self) -> bool:
        """Whether it has a part in routing and weight updates."""
        return self.state not in OUT

    @property
    def info(self) -> ServerInfo | None:
        """The abilities that the gserver reported; None before its first report."""
        return self._info

    @info.setter
    def info(self, info: ServerInfo) -> None:
        self._info = info
        self.load.most_requests = info.max_running_requests or 0
        self.load.most_tokens = info.max_total_num_tokens or 0
        self.on_change(self)

    @property
    def stages_weights(self) -> bool:
        """Whether it can receive new weights separately from the served ones."""
        return self._info is not None and self._info.staged_weight_update

    @property
    def ranks(self) -> int:
        """Number of ranks that it has in a weight group."""
        return self._info.tp_size if self._info is not None else 1
