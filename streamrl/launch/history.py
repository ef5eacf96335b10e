"""What the display remembers of a run: finished steps, and rates from differences of counters.

Pure: statuses, steps and times are passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

import msgspec

from streamrl.metrics import StepReport
from streamrl.transport.control.status import ProcessStatus, Status

WINDOW_SECONDS = 10.0


class PoolShares(msgspec.Struct, frozen=True):
    """How the generation pool spent the last seconds; sums to 1."""

    busy: float
    paused: float
    idle: float


class History:
    """The run so far, as far as the display needs it."""

    def __init__(self, *, started: float, window_seconds: float = WINDOW_SECONDS, keep: int = 2000) -> None:
        """`started`: on the clock of all `now`."""
        self.started = started
        self.steps: deque[StepReport] = deque(maxlen=keep)
        self.status: Status | None = None
        self.generated_rates: deque[float] = deque(maxlen=keep)
        """Tokens per second of the generation pool, one value for each status."""
        self._window = window_seconds
        self._seen: deque[tuple[float, dict[str, ProcessStatus]]] = deque()

    def add_status(self, status: Status, *, now: float) -> None:
        self.status = status
        gservers = {f"{p.index}/{p.pid}": p for p in status.processes if p.role == "gserver"}
        self._seen.append((now, gservers))
        while len(self._seen) > 2 and now - self._seen[0][0] > self._window:
            self._seen.popleft()
        if self._servers_in_both():
            self.generated_rates.append(self._growth("tokens_generated_total"))
        if status.last_step is not None:
            self.add_steps([status.last_step])

    def add_steps(self, steps: Iterable[StepReport]) -> list[StepReport]:
        """Take in steps, in order; answers those that are new."""
        new = []
        for step in steps:
            if not self.steps or step.step > self.steps[-1].step:
                self.steps.append(step)
                new.append(step)
        return new

    def values(self, metric: str) -> list[float]:
        """One value for each remembered step that has `metric`."""
        return [step.metrics[metric] for step in self.steps if metric in step.metrics]

    def pool_shares(self) -> PoolShares | None:
        """None before there are two looks at a gserver."""
        servers = self._servers_in_both()
        if not servers:
            return None
        busy = min(1.0, self._growth("busy_seconds_total") / len(servers))
        paused = min(1.0 - busy, self._growth("pause_seconds_total") / len(servers))
        return PoolShares(busy=busy, paused=paused, idle=1.0 - busy - paused)

    def trainer_shares(self) -> dict[str, float]:
        """Share of the last step's time by span name; what no span covers is `other`.

        Without `publish`, which runs beside the next step.
        """
        spans = [span for span in self.steps[-1].spans if span[0] != "publish"] if self.steps else []
        if not spans:
            return {}
        total = max(self.steps[-1].time, *(end for _, _, end in spans)) - min(begin for _, begin, _ in spans)
        if total <= 0:
            return {}
        shares: dict[str, float] = {}
        for name, begin, end in spans:
            shares[name] = shares.get(name, 0.0) + (end - begin) / total
        other = 1.0 - sum(shares.values())
        return {**shares, "other": other} if other > 0.005 else shares

    def seconds_per_step(self) -> float | None:
        """Median of the last twenty steps; None before the second step."""
        times = [step.time for step in self.steps][-21:]
        return median(b - a for a, b in pairwise(times)) if len(times) > 1 else None

    def _servers_in_both(self) -> list[str]:
        if len(self._seen) < 2:
            return []
        return [key for key in self._seen[-1][1] if key in self._seen[0][1]]

    def _growth(self, counter: str) -> float:
        """Growth of `counter` per second, summed over gservers, in the window."""
        servers = self._servers_in_both()
        (begin, old), (end, new) = (self._seen[0], self._seen[-1]) if self._seen else ((0.0, {}), (0.0, {}))
        if not servers or end <= begin:
            return 0.0
        grown = sum(new[key].stats.get(counter, 0.0) - old[key].stats.get(counter, 0.0) for key in servers)
        return max(0.0, grown) / (end - begin)
