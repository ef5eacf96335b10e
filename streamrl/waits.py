"""Waiting: for a condition, for the first of several coroutines, and between attempts at an operation.

Invariant: no wait is silent. All operations with failures that may pass use `Retry`. The constants are times that
several modules share; [limits] of the configuration has the times that a run may set.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

CLOSE_SECONDS = 1.0
"""Longest time, when a server closes, for open connections and for requests in progress."""
ANSWER_SECONDS = 5.0
"""Deadline of a request to which a live process replies at once."""
WARNING_SECONDS = 30.0
"""A longer wait is named in the log."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
"""Pauses in a series of failures double, from the first (or the caller's own value) to the longest."""

log = logging.getLogger(__name__)


async def first_of(*works: Coroutine[Any, Any, Any], timeout: float | None = None) -> list[asyncio.Task[Any]]:
    """Run `works` concurrently until one of them ends, or for `timeout` seconds; then cancel the others.

    Return their tasks, in the same order, all ended. Raises the error of the first one to end, if it failed.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(*tasks)
    for task in done:
        task.result()
    return tasks


async def cancel(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel `tasks`, and wait for their ends; their errors are only logged, for debugging. None stands for no task."""
    present = [task for task in tasks if task is not None]
    for task in present:
        task.cancel()
    for ended in await asyncio.gather(*present, return_exceptions=True):
        if isinstance(ended, Exception):
            log.debug("a task that is no longer needed has failed: %s", ended, exc_info=ended)


class Wakeup:
    """Lets coroutines wait for a condition. Code that changes the state behind the condition calls `notify`."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Let every waiter check its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, ready: Callable[[], bool], *, timeout: float | None = None) -> bool:
        """Wait until `ready()` is true, at most `timeout` seconds; return its last value."""
        try:
            async with asyncio.timeout(timeout):
                while not ready():
                    await self._changed.wait()
        except TimeoutError:
            return ready()
        return True

    async def sleep(self, timeout: float | None = None) -> bool:
        """Wait until the next `notify`, at most `timeout` seconds; return whether it came."""
        return await self.until(self._changed.is_set, timeout=timeout)


@contextmanager
def warned_of(what: Callable[[], str], *, after: float, log: logging.Logger) -> Iterator[None]:
    """Log a warning that the result of `what` is awaited if the context takes longer than `after` seconds, and again
    each time that it has taken twice as long."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    timers: list[asyncio.TimerHandle] = []

    def warn() -> None:
        waited = loop.time() - began
        log.warning("waiting for %s, for %.0f s now", what(), waited)
        timers[:] = [loop.call_later(waited, warn)]

    timers.append(loop.call_later(after, warn))
    try:
        yield
    finally:
        timers[0].cancel()


class Retry:
    """Counts consecutive failures of one operation, and waits between them.

    Each series of failures logs one warning, and another line when it is over.
    """

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
