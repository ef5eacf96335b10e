"""One signal for everything that waits on shared state: the waiter looks again whenever it is notified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Wakeup:
    """Waiters name a condition; whoever changes the state calls `notify`."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Let every waiter look at its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, ready: Callable[[], bool], *, timeout: float | None) -> bool:
        """Wait until `ready()`, at most `timeout` seconds; answers whether it is."""
        try:
            async with asyncio.timeout(timeout):
                while not ready():
                    await self._changed.wait()
        except TimeoutError:
            return ready()
        return True

    async def sleep(self, timeout: float | None) -> None:
        """Until the next `notify`, at most `timeout` seconds."""
        changed = self._changed
        await self.until(changed.is_set, timeout=timeout)
