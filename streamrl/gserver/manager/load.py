"""How much work one gserver has, how fast it is, and whether it takes more. Pure; times in seconds are passed in.

The manager counts what it has routed to a gserver; heartbeats tell what really runs and waits there. Between two
heartbeats the estimate is what was measured plus what was routed since. Invariant: the estimate never exceeds what
is routed there, and what was routed a moment before a measurement is not forgotten by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

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
        """A group that had `before` in flight here has `after` now."""
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
