"""Pauses between attempts at an operation, until one succeeds or patience has run out.

All operations with failures that may pass use `Retry`; the caller handles the end of its patience.
Invariant: no wait is silent. Each series of failures logs one warning, and another line when it is over.
"""

from __future__ import annotations

import asyncio
import logging
import time

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
"""Pauses in a series of failures double, from the first (or the caller's own value) to the longest."""


class Retry:
    """Counts consecutive failures of one operation, and waits between them."""

    def __init__(
        self, what: str, *, patience: float, first_pause: float = FIRST_PAUSE_SECONDS, warn_after: float = 0.0
    ) -> None:
        """`what`: its name in the log. `patience`: seconds of retries after the first failure of a series; infinite:
        forever. `first_pause`: in seconds. `warn_after`: seconds of failures before the warning."""
        self._what = what
        self._patience = patience
        self._first_pause = first_pause
        self._warn_after = warn_after
        self._failing_since: float | None = None
        self._failures = 0
        self._warned = False

    @property
    def failing_seconds(self) -> float:
        """Seconds since the first failure of the series; 0 if the last attempt succeeded."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    def succeeded(self) -> None:
        """Note that an attempt succeeded: the series of failures is over."""
        if self._warned:
            log.warning("%s succeeded after %.1f s", self._what, self.failing_seconds)
        self._failing_since = None
        self._failures = 0
        self._warned = False

    async def pause(self, error: Exception) -> bool:
        """Wait after an attempt that failed with `error`; return False at once if patience has run out."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        failing = now - self._failing_since
        if failing >= self._patience:
            return False
        if failing >= self._warn_after and not self._warned:
            self._warned = True
            left = f"for {self._patience:.0f} s" if self._patience < float("inf") else "until it succeeds"
            log.warning("%s is tried again %s: %s", self._what, left, error)
        pause = min(LONGEST_PAUSE_SECONDS, self._first_pause * 2 ** min(self._failures, 30))
        self._failures += 1
        await asyncio.sleep(min(pause, self._patience - failing))
        return True
