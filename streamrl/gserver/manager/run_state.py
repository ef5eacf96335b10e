"""The state of the run as a whole, and the signals between the manager's parts.

A run joins, runs, and ends once, for one reason. For each event that a coroutine may wait for there is a signal
(`Signals`): a `Wakeup`, after which every waiter checks its condition again, or a `WaitingQueue` if there can be very
many waiters.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from streamrl.gserver.manager.gserver import Gserver
from streamrl.transport.control import Admission

log = logging.getLogger(__name__)

Found = TypeVar("Found")
Ending = Literal["finished", "stopped", "failed"]


class Wakeup:
    """Lets coroutines wait for a condition. Code that changes the state behind the condition calls `notify`."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Let every waiter check its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, ready: Callable[[], bool], *, timeout: float | None) -> bool:
        """Wait until `ready()` is true, at most `timeout` seconds; return its last value."""
        try:
            async with asyncio.timeout(timeout):
                while not ready():
                    await self._changed.wait()
        except TimeoutError:
            return ready()
        return True

    async def sleep(self, timeout: float | None) -> None:
        """Wait until the next `notify`, at most `timeout` seconds."""
        changed = self._changed
        await self.until(changed.is_set, timeout=timeout)


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


@dataclass(frozen=True)
class Signals:
    """One signal for each kind of change; all of them are notified when the run is over."""

    joined: Wakeup = field(default_factory=Wakeup)
    """A process has registered."""
    silences: Wakeup = field(default_factory=Wakeup)
    """A process has fallen silent, or has returned from silence."""
    gservers: Wakeup = field(default_factory=Wakeup)
    """A gserver has sent a message."""
    data: Wakeup = field(default_factory=Wakeup)
    """The size of the data set is known."""
    told: Wakeup = field(default_factory=Wakeup)
    """One more process has been informed of the end of the run, or is gone."""
    deadlines: Wakeup = field(default_factory=Wakeup)
    """A deadline may have moved closer."""
    admissions: WaitingQueue[list[Admission]] = field(default_factory=WaitingQueue)
    """Calls that wait for room in the ledger and a gserver with capacity, to start groups."""
    held_out: WaitingQueue[list[Admission]] = field(default_factory=WaitingQueue)
    """Calls that wait for a held-out prompt and a gserver for it."""
    routes: WaitingQueue[Gserver] = field(default_factory=WaitingQueue)
    """Calls that wait for a gserver with capacity, for groups that lost their gserver."""

    def capacity(self) -> None:
        """Wake the queues, since a gserver may have capacity again: running groups first, held-out prompts last."""
        self.routes.wake()
        self.admissions.wake()
        self.held_out.wake()

    def over(self) -> None:
        """Wake all waiters, since the run is over."""
        for wakeup in (self.joined, self.silences, self.gservers, self.data, self.told, self.deadlines):
            wakeup.notify()
        for queue in (self.routes, self.admissions, self.held_out):
            queue.close()


class RunState:
    """State of the run; its end is signalled to all waiters."""

    def __init__(self, signals: Signals) -> None:
        self.name: Literal["joining", "running"] | Ending = "joining"
        self.message = ""
        """Why it ended."""
        self._signals = signals

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.name not in ("joining", "running")

    def end(self, name: Ending, message: str) -> None:
        """End the run for the reason `message`; the first reason stands."""
        if self.over:
            return
        self.name = name
        self.message = message
        log.log(logging.ERROR if name == "failed" else logging.INFO, "the run is over (%s): %s", name, message)
        self._signals.over()
