"""What a rollout worker or an evaluator is doing: counts for the dashboard, what it waits for, reasons for the log."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

REWARD_WINDOW = 64
"""Groups over which the mean reward goes."""
REASONS_PER_INTERVAL = 5
REASON_INTERVAL_SECONDS = 10.0


class Activity:
    """Counters of one worker."""

    def __init__(self, *, idle: str) -> None:
        """`idle`: what it waits for when nothing is under way."""
        self._idle = idle
        self.groups_running = 0
        self.groups_done = 0
        self.groups_rejected = 0
        self.groups_uniform = 0
        self.reward_errors = 0
        self.reward_busy_seconds: Callable[[], float] = float
        """Asked what the reward processes have been busy for; 0 where there are none."""
        self._requests = 0
        self._held_back = 0
        self._scores = 0
        self._pushes = 0
        self._tokens = 0
        self._interruptions = 0
        self._reward_seconds = 0.0
        self._rewards: deque[float] = deque(maxlen=REWARD_WINDOW)
        self._on_wait: Callable[[str], None] | None = None
        self._waiting_for = ""
        self._reasons = _ReasonLog()

    def on_wait(self, show: Callable[[str], None]) -> None:
        """Call `show` now, and whenever what the worker waits for changes."""
        self._on_wait = show
        self._waiting_for = ""
        self._update()

    def stats(self) -> dict[str, float]:
        """Gauges and counters for the heartbeat."""
        stats: dict[str, float] = {
            "groups_running": self.groups_running,
            "groups_pushing": self._pushes,
            "groups_done_total": self.groups_done,
            "groups_rejected_total": self.groups_rejected,
            "groups_uniform_total": self.groups_uniform,
            "requests_in_flight": self._requests,
            "tokens_generated_total": self._tokens,
            "interruptions_total": self._interruptions,
            "reward_seconds_total": self._reward_seconds,
            "reward_busy_seconds_total": self.reward_busy_seconds(),
            "reward_errors_total": self.reward_errors,
        }
        if self._rewards:
            stats["reward_mean"] = sum(self._rewards) / len(self._rewards)
        return stats

    @contextmanager
    def group(self) -> Iterator[None]:
        """A group runs."""
        self.groups_running += 1
        self._update()
        try:
            yield
        finally:
            self.groups_running -= 1
            self._update()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A generation request is in flight."""
        self._requests += 1
        self._update()
        try:
            yield
        finally:
            self._requests -= 1
            self._update()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A response waits until it may be scored."""
        self._held_back += 1
        self._update()
        try:
            yield
        finally:
            self._held_back -= 1
            self._update()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """A response is scored."""
        self._scores += 1
        self._update()
        started = time.monotonic()
        try:
            yield
        finally:
            self._reward_seconds += time.monotonic() - started
            self._scores -= 1
            self._update()

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """A finished group is on its way to the trainer."""
        self._pushes += 1
        self._update()
        try:
            yield
        finally:
            self._pushes -= 1
            self._update()

    def generated(self, *, tokens: int, interruptions: int) -> None:
        """A response is complete."""
        self._tokens += tokens
        self._interruptions += interruptions

    def done(self, *, mean_reward: float) -> None:
        """A group is stored with the trainer."""
        self.groups_done += 1
        self._rewards.append(mean_reward)

    def rejected(self, seq: int, reason: BaseException, *, what: str = "group") -> None:
        """A group was given up."""
        self.groups_rejected += 1
        self.log_reason(f"{what} {seq} is rejected", reason)

    def uniform(self) -> None:
        """A group was given up because its responses all scored the same."""
        self.groups_uniform += 1

    def log_reason(self, what: str, reason: BaseException) -> None:
        """Log once for each event, a few in every interval."""
        self._reasons.log(what, reason)

    def _update(self) -> None:
        """Tell what the worker waits for: the earliest stage that has something in it."""
        if self._requests:
            waiting_for = "generation"
        elif self._held_back:
            waiting_for = "the master to ask for scores"
        elif self._scores:
            waiting_for = "rewards"
        elif self._pushes:
            waiting_for = "credit of the trainer"
        else:
            waiting_for = self._idle
        if waiting_for != self._waiting_for:
            self._waiting_for = waiting_for
            if self._on_wait is not None:
                self._on_wait(waiting_for)


class _ReasonLog:
    """Warnings, at most `REASONS_PER_INTERVAL` in an interval; the rest is counted."""

    def __init__(self) -> None:
        self._started = 0.0
        self._written = 0
        self._silenced = 0

    def log(self, what: str, reason: BaseException) -> None:
        now = time.monotonic()
        if now - self._started >= REASON_INTERVAL_SECONDS:
            if self._silenced:
                log.warning("%d more like those before", self._silenced)
            self._started, self._written, self._silenced = now, 0, 0
        if self._written >= REASONS_PER_INTERVAL:
            self._silenced += 1
            return
        self._written += 1
        log.warning("%s: %s: %s", what, type(reason).__name__, reason)
