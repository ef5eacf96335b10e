"""Activity of a rollout worker: counts for its heartbeats, its present wait, and errors for its log."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from streamrl.errors import RewardError
from streamrl.records.logs import RateLimitedLog
from streamrl.records.timeline import FrequentFailure, error_kind

log = logging.getLogger(__name__)

REWARD_WINDOW = 64
"""Number of latest groups in the mean reward."""
MOST_METRICS = 64
"""Most names of agents' own metrics."""
MOST_FAILURES = 64
"""Most kinds of errors that are counted separately."""
LONGEST_ERROR = 240
"""Most characters of an error that are shown."""

GENERATION, PLAYING, BEFORE_PLAYING, BEFORE_SCORING, SCORING, RETRYING, PUSHING = STAGES = (
    "generation",
    "agents at work, tools included",
    "agents to take their episodes",
    "the master to ask for scores",
    "rewards",
    "failed siblings to be made again",
    "credit of the trainer",
)
"""Stages of a response or group in order. Each is named by the event that the worker waits for while an item is in it.
"""


def in_one_line(error: BaseException) -> str:
    """Return the message of `error` with its type, or the last line of a message that has a traceback."""
    lines = str(error).strip().splitlines()
    text = lines[-1].strip() if len(lines) > 1 else f"{type(error).__name__}: {error}"
    return text if len(text) <= LONGEST_ERROR else f"{text[: LONGEST_ERROR - 1]}…"


class Activity:
    """Counters of one kind of work, for training or for evaluations; its items enter and leave their stages here."""

    def __init__(self, *, idle: str) -> None:
        """`idle`: the wait that is shown while no work is in progress."""
        self._idle = idle
        self.groups_running = 0
        self.groups_done = 0
        self.groups_rejected = 0
        self.groups_filtered = 0
        self.groups_shrunk = 0
        """Groups that were finished with fewer siblings than `rollout.group_size`."""
        self.siblings_retried = 0
        """How often a failed sibling was made again."""
        self.reward_errors = 0
        """Responses, or agents' episodes, that could not be scored."""
        self.episodes: dict[str, float] = {}
        """Sums over the agents' episodes that ended with trajectories, by the name of the figure."""
        self.agent_retries: Callable[[], int] = int
        """Returns how many agents' requests received the answer of an earlier request."""
        self.reward_busy_seconds: Callable[[], float] = float
        """Returns the seconds spent in the reward function, over all calls; 0 without reward processes."""
        self.reward_calls_at_once: Callable[[], int] = int
        """Returns the simultaneous calls of each reward process; 0 without reward processes."""
        self._under_way: Counter[str] = Counter()
        """Number of responses or groups in each stage."""
        self._tokens = 0
        self._interruptions = 0
        self._reward_seconds = 0.0
        self._metrics: dict[str, tuple[float, int]] = {}
        """Agents' own metrics: name → sum and count."""
        self._rewards: deque[float] = deque(maxlen=REWARD_WINDOW)
        self._on_wait: Callable[[str], None] | None = None
        self._waiting_for = ""
        self._reasons = RateLimitedLog(log)
        self._failures: dict[str, FrequentFailure] = {}
        """Counted failures by kind of error."""
        self.describe_row: Callable[[int], str] = "seq {}".format
        """Returns a short description of the row of a sequence number."""

    def on_wait(self, show: Callable[[str], None]) -> None:
        """Call `show` now, and whenever the process begins another wait."""
        self._on_wait = show
        self._waiting_for = ""
        self._update()

    def stats(self) -> dict[str, float]:
        """Return gauges and counters for the heartbeat."""
        stats: dict[str, float] = {
            "groups_running": self.groups_running,
            "groups_pushing": self._under_way[PUSHING],
            "groups_done_total": self.groups_done,
            "groups_rejected_total": self.groups_rejected,
            "groups_filtered_total": self.groups_filtered,
            "groups_shrunk_total": self.groups_shrunk,
            "siblings_retried_total": self.siblings_retried,
            "requests_in_flight": self._under_way[GENERATION],
            "tokens_generated_total": self._tokens,
            "interruptions_total": self._interruptions,
            "reward_seconds_total": self._reward_seconds,
            "reward_busy_seconds_total": self.reward_busy_seconds(),
            "reward_calls_at_once": self.reward_calls_at_once(),
            "reward_errors_total": self.reward_errors,
        }
        if playing := self._under_way[PLAYING]:
            stats["agent_episodes_running"] = playing
        if self.episodes:
            stats |= {f"agent_{name}_total": value for name, value in self.episodes.items()}
            stats["agent_retries_total"] = self.agent_retries()
            for name, (total, count) in self._metrics.items():
                stats |= {f"agent_metric_total/{name}": total, f"agent_metric_count/{name}": count}
        if self._rewards:
            stats["reward_mean"] = sum(self._rewards) / len(self._rewards)
        return stats

    @contextmanager
    def group(self) -> Iterator[None]:
        """Count a group as running while inside."""
        self.groups_running += 1
        try:
            yield
        finally:
            self.groups_running -= 1

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Count a response as being scored while inside."""
        started = time.monotonic()
        with self.in_stage(SCORING):
            try:
                yield
            finally:
                self._reward_seconds += time.monotonic() - started

    @contextmanager
    def retrying(self) -> Iterator[None]:
        """Count a retry, and a failed sibling as waiting for it while inside."""
        self.siblings_retried += 1
        with self.in_stage(RETRYING):
            yield

    def generated(self, *, tokens: int, interruptions: int) -> None:
        """Count a complete response."""
        self._tokens += tokens
        self._interruptions += interruptions

    def done(self, *, mean_reward: float) -> None:
        """Count a group that is stored with the trainer."""
        self.groups_done += 1
        self._rewards.append(mean_reward)

    def rejected(self, seq: int, reason: BaseException) -> None:
        """Count a rejected group, and log the reason. A failure of the reward was already counted with its response."""
        self.groups_rejected += 1
        self.failed(seq, reason)
        self.log_reason(f"group {seq} is rejected", reason)

    def failed(self, seq: int, reason: BaseException) -> None:
        """Count the failure of a sibling or a group among the frequent ones, unless `unscored` has counted it."""
        if not isinstance(reason, RewardError):
            self._count_failure(seq, reason)

    def unscored(self, seq: int, reason: BaseException) -> None:
        """Count a response, or an agent's episode, that could not be scored."""
        self.reward_errors += 1
        self._count_failure(seq, reason)

    def frequent_failure(self) -> FrequentFailure | None:
        """Return the failure with the highest count; None if there was none."""
        return max(self._failures.values(), key=lambda failure: failure.count, default=None)

    def _count_failure(self, seq: int, reason: BaseException) -> None:
        error = in_one_line(reason)
        kind = error_kind(error)
        if (known := self._failures.get(kind)) is not None:
            self._failures[kind] = msgspec.structs.replace(known, count=known.count + 1)
        elif len(self._failures) < MOST_FAILURES:
            self._failures[kind] = FrequentFailure(error, 1, self.describe_row(seq))

    def log_reason(self, what: str, reason: BaseException) -> None:
        """Log an event and its reason, unless similar messages are being suppressed."""
        self._reasons.warning("%s: %s: %s", what, type(reason).__name__, reason)

    def episode_ended(self, figures: Mapping[str, float], *, metrics: Mapping[str, float]) -> None:
        """Add the `figures` of an agent's episode to the sums of their names.

        `metrics`: the agent's own figures; those beyond `MOST_METRICS` names are left out.
        """
        for name, value in {"episodes": 1, **figures}.items():
            self.episodes[name] = self.episodes.get(name, 0) + value
        for name, value in metrics.items():
            if name in self._metrics or len(self._metrics) < MOST_METRICS:
                total, count = self._metrics.get(name, (0.0, 0))
                self._metrics[name] = (total + value, count + 1)

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[None]:
        """Count a response or a group as in `stage`, one of `STAGES`, while inside."""
        self._under_way[stage] += 1
        if self._under_way[stage] == 1:
            self._update()
        try:
            yield
        finally:
            self._under_way[stage] -= 1
            if not self._under_way[stage]:
                self._update()

    def _update(self) -> None:
        """Report the wait of the process: the earliest stage with an item in it."""
        waiting_for = next((stage for stage in STAGES if self._under_way[stage]), self._idle)
        if waiting_for != self._waiting_for:
            self._waiting_for = waiting_for
            if self._on_wait is not None:
                self._on_wait(waiting_for)
