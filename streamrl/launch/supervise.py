"""How often, and how soon, a process that died is started again. Pure: times are passed in, in seconds.

Invariant: at most `most` restarts of one process within `window` seconds; each waits twice as long as the one
before it, until none is left in the window. One that has died too often may rest until the window has moved on.

Watches the processes of a run until it is over, and says which one is to blame when it fails.

Owns no process: `Children` does. Invariant: the death of any process ends the wait, either by a
restart (of roles whose work the manager gives out again) or by an error that
names the process and shows the last it said. One of those roles that the manager hears nothing of is as good as
dead, and is ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection

from streamrl import essential
from streamrl.config import Config, GserverConfig
from streamrl.errors import ProcessDied, StreamRLError
from streamrl.launch.children import Child, Children
from streamrl.launch.processes import PlanRole
from streamrl.retry import Retry
from streamrl.transport.control import Status
from streamrl.transport.manager_client import ControlClient

# --- restarts ---

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


def restarts_of(config: Config, role: PlanRole) -> Restarts:
    """Return how often, and how soon, processes of `role` are started again."""
    settings = config.gserver if role == "gserver" else config.rollout
    return Restarts(
        most=settings.max_restarts if isinstance(settings, GserverConfig) else settings.restarts,
        window=settings.restart_window_seconds,
        delay=settings.restart_delay_seconds,
    )


# --- supervise ---

log = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""How long processes may take to leave by themselves once the run is over."""
REPLACED: Collection[PlanRole] = ("gserver", "rollout", "evaluator")
"""Roles whose work others do when a process is lost, until another takes its place."""
UNHEARD_SECONDS = 30.0
"""A manager that has not said for so long who is silent is worth a warning."""
CULPRIT_SECONDS = 3.0
"""How long a process that gave up may take to end, so that its log is complete."""

GoOn = Callable[[Child, Status | None], Awaitable[bool]]
"""From a child that died, and the run's state if the manager told it, to whether the run goes on."""


async def never(child: Child, status: Status | None) -> bool:
    """Nothing is started again."""
    return False


async def until_finished(children: Children, *, client: ControlClient, goes_on: GoOn = never) -> None:
    """Wait until the master has ended well and all others had time to leave; where it is on another machine, until
    all have left.

    `goes_on` is asked about each child that died before the end of the run. Raises `ProcessDied` when the run cannot
    go on.
    """
    watching = essential.begin(end_who_is_silent(children, client), name="the watch over silence")
    try:
        await _until_the_master_has_ended(children, client, goes_on)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await _let_leave(children)


async def end_who_is_silent(children: Children, client: ControlClient) -> None:
    """End those by force that hang, or were stopped: their work is done by others already, and they are replaced."""
    changes = 0
    retry = Retry("to ask the manager who is silent", patience=math.inf, warn_after=UNHEARD_SECONDS)
    ending: dict[Child, asyncio.Task[None]] = {}
    try:
        while True:
            try:
                silence = await client.silence(changes)
            except StreamRLError as error:  # the manager's own end is told by its exit
                await retry.pause(error)
                continue
            retry.succeeded()
            if silence.over:
                return
            changes = silence.changes
            silent = {(process.role, process.index, process.pid) for process in silence.processes}
            for child in children.running:
                if child.process is None or child.process.role not in REPLACED:
                    continue
                if (child.process.role, child.process.index, child.pid) not in silent:
                    if child in ending:
                        ending.pop(child).cancel()  # it is heard of again
                elif child not in ending:
                    why = "the manager heard nothing of it"
                    ending[child] = asyncio.create_task(child.end_by_force(why), name=f"end of {child.name}")
    finally:
        for task in ending.values():
            task.cancel()


async def _until_the_master_has_ended(children: Children, client: ControlClient, goes_on: GoOn) -> None:
    while True:
        child = await children.next_exit()
        assert child.process is not None
        status = await _status(client)
        state = "unknown" if status is None else status.state
        if status is not None and state == "failed":
            raise ProcessDied(await _failure(children, child, status.message))
        # A manager that does not answer may have left already; if it broke, its own exit code tells.
        if child.exit_code == 0 and state in ("finished", "unknown"):
            log.debug("%s left", child.name)
            if child.process.role == "master" or not _members(children):
                break
        elif child.exit_code == 0 and state == "running" and _is_no_member(child, status) and _may_leave(child):
            log.info("%s has left the run, as it was asked to", child.name)
        elif not (child.exit_code != 0 and await goes_on(child, status)):
            early = "the run was not over, but " if child.exit_code == 0 else ""
            raise ProcessDied(early + child.obituary())


def _members(children: Children) -> list[Child]:
    """Return the running children that take part in the run; others, such as the page, are stopped when it is over."""
    return [child for child in children.running if child.process is not None]


async def _let_leave(children: Children) -> None:
    waiting = [asyncio.create_task(child.ended.wait()) for child in _members(children)]
    if not waiting:
        return
    try:
        await asyncio.wait(waiting, timeout=LEAVE_SECONDS)
    finally:
        for task in waiting:
            task.cancel()
    for child in _members(children):
        log.warning("%s has not left %.0f s after the end of the run: stopping it", child.name, LEAVE_SECONDS)


def _may_leave(child: Child) -> bool:
    """Whether the run goes on without `child` where it has left in order."""
    return child.process is not None and child.process.role in ("gserver", "rollout")


async def _status(client: ControlClient) -> Status | None:
    try:
        return await client.status()
    except StreamRLError as error:  # the manager may be the one that died
        log.debug("the manager does not tell its state: %s", error)
        return None


def _is_no_member(child: Child, status: Status | None) -> bool:
    names = {f"{process.role}/{process.index}" for process in status.processes} if status is not None else set()
    return child.name not in names


async def _failure(children: Children, first: Child, message: str) -> str:
    """What to tell of a run that gave up with `message`; `first` is the first process seen to end."""
    culprit = next((child for child in children.known if message.startswith(f"{child.name}:")), first)
    if culprit.exit_code is None:
        with_end = asyncio.create_task(culprit.ended.wait())
        await asyncio.wait([with_end], timeout=CULPRIT_SECONDS)
        with_end.cancel()
    text = f"the run failed: {message}"
    if culprit.exit_code == 0:
        return text
    return f"{text}\n{culprit.obituary()}"
