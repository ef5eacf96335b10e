"""How much work a gserver has, how fast it is, and whether it takes more. Pure; times in seconds are passed in.

The manager counts what it has routed to a gserver; heartbeats tell what really runs and waits there. Between two
heartbeats the estimate is what was measured plus what was placed since. Invariant: the estimate never exceeds what
is routed there and known, and what was placed a moment before a measurement is not forgotten by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

UNSEEN_SECONDS = 0.5
"""What was placed so shortly before a measurement may not have reached the gserver yet."""
AHEAD = 0.25
"""Share of its capacity that a gserver may have waiting, so that no slot is empty while the manager hears of it."""
SPEED_GAIN = 0.3
"""Weight of a new measurement of speed."""
COMPARABLE = 0.8
"""A measurement at this share of the earlier concurrency is of the same thing: it may lower the speed."""
FORGET = 0.99
"""Factor on the concurrency of the speed with each measurement at a lower one, so that an old one fades."""
LEAST_BUSY_SECONDS = 0.05
"""Less computing between two heartbeats says nothing about speed."""


class Work(NamedTuple):
    """What one group, or one prompt of an evaluation, has in flight."""

    requests: int
    tokens: int
    """Of their contexts."""


class GserverLoad:
    """One gserver's."""

    def __init__(self) -> None:
        self.routed = Work(0, 0)
        """Everything that is routed to it and still in flight."""
        self.most_requests = 0
        """That it runs together; 0: not known."""
        self.most_tokens = 0
        """That its cache holds; 0: not known."""
        self.speed: float | None = None
        """Tokens generated in a second of computing at the highest concurrency of late; None: not measured yet."""
        self._measured: float | None = None  # requests there at the last heartbeat, and what changed since
        self._tokens_each: float | None = None
        self._placed: deque[tuple[float, int]] = deque()
        self._speed_at = 0.0  # concurrency
        self._totals: tuple[float, float, float] | None = None

    @property
    def requests(self) -> float:
        """That run or wait there, as far as is known."""
        if self._measured is None:
            return self.routed.requests
        return min(self.routed.requests, max(0.0, self._measured))

    @property
    def tokens_each(self) -> float:
        """Mean context of a request there."""
        if self._tokens_each is not None:
            return self._tokens_each
        return self.routed.tokens / self.routed.requests if self.routed.requests else 0.0

    @property
    def full(self) -> bool:
        """Whether further work has to wait for a place. One that has nothing takes anything."""
        requests = self.requests
        if requests == 0:
            return False
        too_many = bool(self.most_requests) and requests >= self.most_requests * (1 + AHEAD)
        return too_many or (bool(self.most_tokens) and requests * self.tokens_each >= self.most_tokens)

    def size(self, tokens_each: float) -> float:
        """Load in requests of average size: half by their number, half by their tokens.

        `tokens_each`: mean context of a request anywhere.
        """
        requests = self.requests
        return requests * (1 + self.tokens_each / tokens_each) / 2 if tokens_each else requests

    def change(self, before: Work, after: Work, *, now: float) -> None:
        """What was `before` in flight here is `after` now."""
        more = after.requests - before.requests
        self.routed = Work(self.routed.requests + more, self.routed.tokens + after.tokens - before.tokens)
        if self._measured is not None:
            self._measured += more
        if more > 0:
            self._placed.append((now, more))
            self._forget_placed(now)

    def measure(self, stats: Mapping[str, float], *, now: float) -> None:
        """A heartbeat told `stats`; names that are missing tell nothing."""
        if "running" in stats:
            self._forget_placed(now)
            running, unseen = stats["running"], sum(requests for _, requests in self._placed)
            self._measured = running + stats.get("queued", 0.0) + unseen
            if "running_tokens" in stats and running > 0:
                self._tokens_each = stats["running_tokens"] / running
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
            self.speed, self._speed_at = speed, concurrency
        elif speed > self.speed or concurrency >= COMPARABLE * self._speed_at:
            self.speed += SPEED_GAIN * (speed - self.speed)
            self._speed_at += SPEED_GAIN * (concurrency - self._speed_at)
        else:
            self._speed_at *= FORGET

    def _forget_placed(self, now: float) -> None:
        while self._placed and self._placed[0][0] < now - UNSEEN_SECONDS:
            self._placed.popleft()
