"""Rate-limited warnings, for events that other processes can cause at any rate: the rest are counted."""

from __future__ import annotations

import logging
import time

AT_ONCE = 5
"""Number of warnings that are logged at once; after these, one every `SECONDS`."""
SECONDS = 10.0


class RateLimitedLog:
    """Logs to `log`, from one thread at a time. The next logged line counts the suppressed ones."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._credit = float(AT_ONCE)
        self._at = time.monotonic()
        self._left_out = 0

    def warning(self, message: str, *arguments: object) -> None:
        """Log a warning, or count it."""
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._at) / SECONDS, float(AT_ONCE))
        self._at = now
        if self._credit < 1:
            self._left_out += 1
            return
        self._credit -= 1
        if self._left_out:
            message += f" (and {self._left_out} more like this since the last line)"
            self._left_out = 0
        self._log.warning(message, *arguments)
