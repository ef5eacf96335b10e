"""Waiting for a condition, or for the first of several coroutines, and warnings about long waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

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
