"""The state of the run as a whole, and the signals between the manager's parts.

A run joins, runs, and ends once, for one reason. For each event that a coroutine may wait for there is a signal: a
`Wakeup`, after which every waiter checks its condition again, or a `WaitingQueue` if there can be very many waiters.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from streamrl.gserver.manager.gserver import Gserver
from streamrl.transport.control import Admission
from streamrl.waits import Wakeup

log = logging.getLogger(__name__)

Found = TypeVar("Found")
Ending = Literal["finished", "stopped", "failed"]


class WaitingQueue(Generic[Found]):
    """Calls that wait for a scarce resource, served in order of arrival.

    Each call has an attempt, which returns None as long as there is nothing for it. Freed resources wake only as many
    calls as they suffice for: the cost does not depend on the number of waiters.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Future[Found | None], Callable[[], Found | None]] = OrderedDict()
        self._woken = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def find(self, attempt: Callable[[], Found | None], *, timeout: float) -> Found | None:
        """Return the result of `attempt` when its turn has come; None after `timeout` seconds, or when the queue is
        closed."""
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
            # a result at the moment of the timeout must not be lost
            return turn.result() if turn.done() and not turn.cancelled() else None
        finally:
            if self._waiting.pop(turn, None) is not None:  # left unserved: there may be a result for the next call
                self.wake()

    def wake(self) -> None:
        """Serve the head of the queue in the next iteration of the event loop: there may be a result for it."""
        if self._waiting and not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._serve)

    def close(self) -> None:
        """End all waiting, with None."""
        self._closed = True
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)

    def _serve(self) -> None:
        self._woken = False
        while self._waiting:
            turn, attempt = next(iter(self._waiting.items()))
            if not turn.done():  # done: its caller has disconnected, or its timeout has passed
                found = attempt()
                if found is None:
                    return
                turn.set_result(found)
            self._waiting.pop(turn)


class RunState:
    """The state of the run, and a signal for each kind of change; all of them are given when the run is over."""

    def __init__(self) -> None:
        self.name: Literal["joining", "running"] | Ending = "joining"
        self.message = ""
        """Why it ended."""
        self.changed = Wakeup()
        """A process has joined, left, fallen silent, returned, or learned of the end; or the size of the data set is
        known."""
        self.gservers = Wakeup()
        """A gserver has sent a message, or may lack the served weights."""
        self.admissions: WaitingQueue[list[Admission]] = WaitingQueue()
        """Calls that wait for room in the ledger and a gserver with capacity, to start groups."""
        self.held_out: WaitingQueue[list[Admission]] = WaitingQueue()
        """Calls that wait for a held-out prompt and a gserver for it."""
        self.routes: WaitingQueue[Gserver] = WaitingQueue()
        """Calls that wait for a gserver with capacity, for groups that lost their gserver."""

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.name not in ("joining", "running")

    def capacity(self) -> None:
        """Wake the queues, since a gserver may have capacity again: running groups first, held-out prompts last."""
        self.routes.wake()
        self.admissions.wake()
        self.held_out.wake()

    def end(self, name: Ending, message: str) -> None:
        """End the run for the reason `message`; the first reason stands."""
        if self.over:
            return
        self.name = name
        self.message = message
        log.log(logging.ERROR if name == "failed" else logging.INFO, "the run is over (%s): %s", name, message)
        self.changed.notify()
        self.gservers.notify()
        for queue in (self.routes, self.admissions, self.held_out):
            queue.close()
