"""Calls that wait for a place, served one after another in the order in which they came.

A change that makes room wakes those it is enough for, not everyone: what it costs does not depend on how many wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")


class Line(Generic[Found]):
    """Every waiter names an attempt, which answers None as long as there is nothing for it."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Future[Found | None], Callable[[], Found | None]] = OrderedDict()
        self._woken = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def find(self, attempt: Callable[[], Found | None], *, timeout: float) -> Found | None:
        """What `attempt` finds when its turn has come; None after `timeout` seconds, or when the line is closed."""
        if not self._waiting or self._closed:
            found = attempt()
            if found is not None or self._closed:
                return found
        turn: asyncio.Future[Found | None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = attempt
        try:
            async with asyncio.timeout(timeout):
                return await turn
        except TimeoutError:
            # found in the same moment: it must not be lost
            return turn.result() if turn.done() and not turn.cancelled() else None
        finally:
            self._waiting.pop(turn, None)

    def wake(self) -> None:
        """There may be something for the first in line: it is looked after once what is going on now is done."""
        if self._waiting and not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._serve)

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)

    def _serve(self) -> None:
        self._woken = False
        while self._waiting:
            turn, attempt = next(iter(self._waiting.items()))
            if not turn.done():  # done: its caller has hung up or waited too long
                found = attempt()
                if found is None:
                    return
                turn.set_result(found)
            self._waiting.pop(turn)
