"""How often, and how soon, a process that died is started again. Pure: times are passed in, in seconds.

Invariant: at most `most` restarts of one process within `window` seconds; each waits twice as long as the one
before it, until none is left in the window. One that has died too often may rest until the window has moved on.
"""

from __future__ import annotations

from collections import defaultdict

LONGEST_DELAY_SECONDS = 60.0


class Restarts:
    """Counts the restarts of processes by their names."""

    def __init__(self, *, most: int, window: float, delay: float) -> None:
        """`delay`: before the first restart."""
        self.most = most
        self.window = window
        self._delay = delay
        self._times: dict[str, list[float]] = defaultdict(list)

    def count(self, name: str) -> int:
        """Restarts of `name` in the window, as of the last one."""
        return len(self._times[name])

    def allow(self, name: str, *, now: float) -> float | None:
        """`name` died: how long to wait before it is started again; None: it has died too often."""
        recent = [time for time in self._times[name] if now - time < self.window]
        self._times[name] = recent
        if len(recent) >= self.most:
            return None
        recent.append(now)
        return float(min(self._delay * 2 ** (len(recent) - 1), LONGEST_DELAY_SECONDS))

    def rest(self, name: str, *, now: float) -> float | None:
        """`name` has died too often: how long to wait until it may be started again; None: it never may."""
        if not self.most:
            return None
        begin = self._times[name][-self.most] + self.window
        self._times[name].append(begin)
        return max(0.0, begin - now)
