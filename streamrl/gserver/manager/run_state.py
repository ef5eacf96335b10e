"""Where the run stands as a whole, and what the manager's parts wait for and wake each other with.

A run joins, runs, and ends once, for one reason. For each thing that somebody may wait for there is a signal
(`Signals`): a `Wakeup`, after which every waiter looks again, or a `WaitingQueue` where there can be very many waiters.
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
    """Lets coroutines wait for a condition; whoever changes the state that it depends on calls `notify`."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Let every waiter look at its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, ready: Callable[[], bool], *, timeout: float | None) -> bool:
        """Wait until `ready()`, at most `timeout` seconds; return whether it is."""
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
    """Calls that wait for something that is short, served one after another in the order in which they came.

    Each names an attempt, which returns None as long as there is nothing for it. A change that frees something wakes
    those it is enough for, not everyone: what it costs does not depend on how many wait.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Future[Found | None], Callable[[], Found | None]] = OrderedDict()
        self._woken = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def find(self, attempt: Callable[[], Found | None], *, timeout: float) -> Found | None:
        """Return what `attempt` finds when its turn has come; None after `timeout` seconds, or when the queue is
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
            # found in the same moment: it must not be lost
            return turn.result() if turn.done() and not turn.cancelled() else None
        finally:
            if self._waiting.pop(turn, None) is not None:  # it left unserved: there may be something for the next one
                self.wake()

    def wake(self) -> None:
        """There may be something for the first in the queue: it is served once what is going on now is done."""
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


@dataclass(frozen=True)
class Signals:
    """Each is notified when what it names has changed, and all when the run is over."""

    joined: Wakeup = field(default_factory=Wakeup)
    """A process has registered."""
    silences: Wakeup = field(default_factory=Wakeup)
    """A process has fallen silent, or is heard of again."""
    gservers: Wakeup = field(default_factory=Wakeup)
    """A gserver was heard of."""
    data: Wakeup = field(default_factory=Wakeup)
    """The size of the data set is known."""
    told: Wakeup = field(default_factory=Wakeup)
    """One more knows that the run is over, or is gone."""
    deadlines: Wakeup = field(default_factory=Wakeup)
    """One may have moved closer."""
    admissions: WaitingQueue[list[Admission]] = field(default_factory=WaitingQueue)
    """Calls that wait for room in the ledger and a gserver with capacity, to start groups."""
    held_out: WaitingQueue[list[Admission]] = field(default_factory=WaitingQueue)
    """Calls that wait for a held-out prompt and a gserver for it."""
    routes: WaitingQueue[Gserver] = field(default_factory=WaitingQueue)
    """Calls that wait for a gserver with capacity, for groups that lost theirs."""

    def capacity(self) -> None:
        """A gserver may have capacity again: for running groups first, for held-out prompts last."""
        self.routes.wake()
        self.admissions.wake()
        self.held_out.wake()

    def over(self) -> None:
        """The run is over: wake everyone who waits."""
        for wakeup in (self.joined, self.silences, self.gservers, self.data, self.told, self.deadlines):
            wakeup.notify()
        for queue in (self.routes, self.admissions, self.held_out):
            queue.close()


class RunState:
    """State of the run; its end is signalled to everyone."""

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
        """The run is over, for the reason `message`; the first reason stands."""
        if self.over:
            return
        self.name = name
        self.message = message
        log.log(logging.ERROR if name == "failed" else logging.INFO, "the run is over (%s): %s", name, message)
        self._signals.over()
