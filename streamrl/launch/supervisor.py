"""The supervisor of a launcher's processes: restarts those that die, and names the first cause if the run fails.

All launchers have one, whether they run everything (`streamrl run`, `launch ray`), a part of the trainer, or a pool of
gservers or rollout workers. Invariants: the death of any process of the run ends the wait for its end, either by a
restart or by an error that names the process and shows the last lines of its log; a process without heartbeats counts
as dead, and is ended.

Restarts are pure, with times in seconds passed in. At most `most` restarts of one process come within `window`; each
waits twice as long as the one before it, until none is left in the window. A process that has died too often may rest
until the window has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast

import msgspec

from streamrl import essential
from streamrl.children import EXIT_GONE_BACK
from streamrl.config import Config
from streamrl.errors import ProcessDied, RunStopped, StreamRLError
from streamrl.launch.children import Child, Children
from streamrl.launch.process import EXIT_FAILED, EXIT_PLACE_TAKEN
from streamrl.launch.processes import PlanRole, ProcessCommands, ProcessPlan
from streamrl.launch.role import place_of
from streamrl.transport.control import FinishRun, Leave, ProcessStatus, Role, Status
from streamrl.transport.manager_client import ControlClient
from streamrl.waits import Retry, cancel

log = logging.getLogger(__name__)

LONGEST_DELAY_SECONDS = 60.0
MOST_DOUBLINGS = 64
"""Most doublings of the delay before a restart: after a thousand doublings it would overflow a float."""
LEAVE_SECONDS = 10.0
"""Longest time for processes to leave by themselves once the run is over."""
RETURN_SECONDS = 5.0
"""Time for a silent gserver or rollout worker to send a heartbeat again before its end begins: after an interruption of
the network the launcher may reach the controller first."""
UNHEARD_SECONDS = 30.0
"""A warning is logged when the controller has not reported the silent processes for this long."""
HUNG_SECONDS = 15.0
"""The launcher ends a controller that has not replied for this long after a first call without a reply."""
STARTED_SECONDS = 60.0
"""A controller that was started more recently may still be loading."""
STATUS_SECONDS = 5.0
"""Longest time until the controller returns its state."""
REPORT_SECONDS = 3.0
"""Longest time for the controller to receive the report that the run has failed."""
CULPRIT_SECONDS = 12.0
"""Longest time for a process that gave up to end, so that its log is complete. The controller first waits until all
others have the reason."""
CONSEQUENCES: Mapping[PlanRole, str] = {
    "gserver": "others continue its requests",
    "rollout": "others take its prompts",
    "model_worker": "the run goes back to its latest checkpoint",
    "controller": "the run goes back to its latest checkpoint",
}
"""What a death means for the work of a process, by role."""


# --- restarts ---


class Restarts:
    """Counts the restarts of processes by their names."""

    def __init__(self, *, most: int, window: float, delay: float) -> None:
        """`delay`: seconds before the first restart."""
        self.most = most
        self.window = window
        self._delay = delay
        self._times: dict[str, list[float]] = defaultdict(list)

    def count(self, name: str) -> int:
        """Return the number of restarts of `name` in the window, as of the last one."""
        return len(self._times[name])

    def allow(self, name: str, *, now: float) -> float | None:
        """Return the seconds to wait before `name`, which has died, is restarted; None: it has died too often."""
        recent = [time for time in self._times[name] if now - time < self.window]
        self._times[name] = recent
        if len(recent) >= self.most:
            return None
        recent.append(now)
        return float(min(math.ldexp(self._delay, min(len(recent), MOST_DOUBLINGS) - 1), LONGEST_DELAY_SECONDS))

    def rest(self, name: str, *, now: float) -> float | None:
        """Return the seconds until `name`, which has died too often, may be restarted; None: never."""
        if not self.most:
            return None
        begin = self._times[name][-self.most] + self.window
        self._times[name].append(begin)
        return max(0.0, begin - now)

    @property
    def exhausted(self) -> str:
        """Description of a budget that is used up; empty if no restart is allowed at all."""
        return f"it was restarted {self.most} times within {self.window:g} s already" if self.most else ""


# --- the supervisor ---


@dataclass(eq=False)
class Supervisor:
    """Starts a launcher's processes, replaces those that die, and waits for the end of the run."""

    config: Config
    children: Children
    commands: ProcessCommands
    client: ControlClient
    _: KW_ONLY
    part: Literal["run", "trainer", "pool"]
    """The part of the run that the launcher has. The run ends if a process of "run" or "trainer" cannot be replaced; it
    continues without gservers and rollout workers of a "pool"."""
    goes_back: bool = True
    """Whether a controller or model worker is replaced, and continues from the latest checkpoint."""
    note: Callable[[str], None] = log.warning
    """Shows a restart to the user."""

    def __post_init__(self) -> None:
        limits = self.config.restarts
        self._restarts = Restarts(most=limits.number, window=limits.window_seconds, delay=limits.delay_seconds)
        self._joined: set[str] = set()
        """Names of processes that have joined the run at least once."""
        self._coming: dict[asyncio.Task[None], str] = {}
        """Names of processes that are about to be restarted, by the task that does it; empty for one that rests."""
        self._ending: list[asyncio.Task[None]] = []
        self._last: Status | None = None
        """The run's state at its end, in case the controller leaves first."""
        self._left_out: Child | None = None
        """The last process that died and is not replaced, though the run continues."""
        self._leaving = False

    async def start(self, process: ProcessPlan, *, died: str = "") -> None:
        """Start `process`; `died`: how the process that it replaces died, empty if it replaces none."""
        await self.children.start(process, self.commands.of(process, died=died))

    def replace_none(self) -> None:
        """Replace no process from now on: the launcher leaves the run."""
        self._leaving = True
        for task in self._coming:
            task.cancel()

    async def until_over(self) -> None:
        """Wait until the run is over, and all children have left it or had time to do so.

        Raises `ProcessDied` if the run cannot continue, `RunStopped` if a stop was requested, `StreamRLError` if the
        run continues with another process in the place of a child. A pool that the run can do without ends without an
        error, unless no process is left and the last one failed.
        """
        watching = essential.begin(self._watch_silence(), name="the watch over silence")
        try:
            last = await self._follow_exits()
        finally:
            await cancel(watching, *self._coming, *self._ending)
        await self._let_leave(last)
        if last is not None and last.state == "stopped" and self.part != "pool":
            raise RunStopped(f"the run was stopped: {last.message}")

    # Ends of processes

    async def _follow_exits(self) -> Status | None:
        """Handle the end of each process until the launcher has nothing left to do in this run; return the run's state.

        That is at the end of the controller, or of all processes if the controller is not among them."""
        while self.children.awaited or self._coming:
            child = await self.children.next_exit()
            status = await self._status() or self._last
            if await self._was_last(child, status):
                return status
        if self._left_out is not None:
            raise ProcessDied(self._left_out.obituary())
        return None

    async def _was_last(self, child: Child, status: Status | None) -> bool:
        """Handle the end of `child`; return whether the launcher has nothing left to do in this run."""
        state = "unknown" if status is None else status.state
        if status is not None and state == "failed" and (child.exit_code or self.part != "pool"):
            raise await self._failure(child, status)
        over, controls = state in ("finished", "stopped"), child.role == "controller"
        if _has_joined(child, status):
            self._joined.add(child.name)
        # A controller that does not reply may have left already; if it failed, its own exit code shows it.
        left = child.exit_code == 0 and (over or state == "unknown")
        left = left or (controls and state == "stopped" and child.exit_code == EXIT_FAILED)  # clusters need this code
        if left or (over and not controls):
            if not left:
                log.warning("%s %s when the run was over; nothing of it is lost", child.name, child.how_it_ended)
            elif self.part == "pool":
                log.info("%s has left the run", child.name)
            return controls or not self.children.awaited
        if self._left_in_order(child, status):
            log.info("%s has left the run", child.name)
        elif (successor := _successor(child, status)) is not None:
            raise StreamRLError(
                f"{child.name} (pid {child.pid}) {child.how_it_ended}: process {successor.pid} on {successor.host} has "
                "taken its place; this trainer ends, and the run continues without it"
            )
        elif child.exit_code == 0:
            raise await self._given_up(child, status, before="the run was not over, but ")
        elif not self._leaving:
            await self._replace(child, status)
        return False

    def _left_in_order(self, child: Child, status: Status | None) -> bool:
        """Return whether `child` was asked to leave the run, which continues without it."""
        if child.exit_code != 0 or child.role not in ("gserver", "rollout"):
            return False
        members = status.processes if status is not None else []
        return self.part == "pool" or not any(_is(process, child) for process in members)

    async def _replace(self, child: Child, status: Status | None) -> None:
        """Restart `child`, which died, or leave it out. Raises `ProcessDied` if the run cannot continue."""
        model_worker, returns = child.role == "model_worker", child.role in ("model_worker", "controller")
        if child.exit_code == EXIT_GONE_BACK or (model_worker and child.ended_because):
            self._restart(child, 0.0)  # it has to begin from the checkpoint, and has not failed
            return
        failed = (child.exit_code or 0) > 0  # an error of its own would occur again
        never_joined = self.part == "run" and child.name not in self._joined
        if never_joined or (returns and (failed or not self.goes_back)):
            raise await self._given_up(child, status)
        if child.role == "controller":
            self._end_model_workers()
        if model_worker:
            await self._report_death(child)
        restarts, now = self._restarts, time.monotonic()
        died = f"{child.name} {child.how_it_ended}; {CONSEQUENCES[child.role]}"
        delay = restarts.allow(child.name, now=now)
        if delay is not None:
            count = f"({restarts.count(child.name)} of {restarts.most}, in {delay:g} s)"
            self.note(f"{died}, and it is restarted {count}{_where(child)}")
            self._restart(child, delay)
            return
        others = self._others(child, status)
        if not others and (returns or self.part == "run"):
            raise await self._given_up(child, status, after=restarts.exhausted)
        delay = restarts.rest(child.name, now=now) if self.part == "run" or status is not None else None
        text = "it is left out" if delay is None else f"it is tried again in {delay:.0f} s"
        names = f"; the run continues with {', '.join(sorted(others))}" if others else ""
        self.note(f"{died}; {restarts.exhausted or 'it is never restarted'}{names}; {text}{_where(child)}")
        if delay is None:
            self._left_out = child
        else:
            self._restart(child, delay, rests=True)

    def _others(self, child: Child, status: Status | None) -> set[str]:
        """Return the names of other processes that do the work of `child`, or are about to."""
        role = child.role
        if role in ("controller", "model_worker") or (role == "rollout" and self.config.trainer.synchronous):
            return set()  # each process has work that no other can do
        states = {f"{p.role}/{p.index}": p.state for p in status.processes if p.role == role} if status else {}
        ours = {known.name for known in self.children.known if known.role == role}
        running = {other.name for other in self.children.members if other.role == role}
        silent = {name for name, state in states.items() if state == "silent"}
        coming = set(self._coming.values()) & ours
        return (((running | (states.keys() - ours)) - silent) | coming) - {child.name}

    def _restart(self, child: Child, delay: float, *, rests: bool = False) -> None:
        """Start a process in the place of `child` after `delay` seconds. `rests`: the run does not count on it."""

        async def start_again() -> None:
            await asyncio.sleep(delay)
            await self.start(await self._renumbered(child), died=child.reason())

        task = essential.begin(start_again(), name=f"restart of {child.name}")
        self._coming[task] = "" if rests else child.name
        task.add_done_callback(self._coming.pop)

    async def _renumbered(self, child: Child) -> ProcessPlan:
        """Return the process to start in the place of `child`.

        In a pool, it gets a new index if another process has the index of `child`: a restarted controller may have
        assigned that index before this process joined it.
        """
        if self.part == "pool" and child.exit_code == EXIT_PLACE_TAKEN:
            try:
                index = await place_of(self.client, self.config, cast(Role, child.role))
                return msgspec.structs.replace(child.process, index=index)
            except StreamRLError as error:
                log.warning("there is no new index for %s: %s", child.name, error)
        return child.process

    def _end_model_workers(self) -> None:
        """Kill the model workers of a dead controller: those that hang would not notice the next one."""
        for child in self.children.members:
            if child.role == "model_worker":
                self._begin_end(child.end_by_force("the run goes back"), child)

    def _begin_end(self, ending: Coroutine[Any, Any, None], child: Child) -> asyncio.Task[None]:
        task = essential.begin(ending, name=f"end of {child.name}")
        self._ending.append(task)
        return task

    async def _let_leave(self, last: Status | None) -> None:
        """Wait until the processes that have joined the run leave it; the others do not learn of its end.
        `last`: the run's state at its end."""
        leaving = [child for child in self.children.members if _has_joined(child, last)]
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                for child in leaving:
                    await child.ended.wait()
        except TimeoutError:
            for child in leaving:
                if child.exit_code is None:
                    log.warning("%s has not left after %.0f s: stopping it", child.name, LEAVE_SECONDS)

    # Silence

    async def _watch_silence(self) -> None:
        """End by force the children that the controller reports as silent, since they hang or were stopped: others do
        their work already, or the run goes back, and they are restarted. Return when the run is over."""
        changes = 0
        retry = Retry("the request for the silent processes", patience=math.inf, warn_after=UNHEARD_SECONDS)
        ending: dict[Child, asyncio.Task[None]] = {}
        while True:
            try:
                silence = await self.client.silence(changes)
            except StreamRLError as error:  # an end of the controller is detected by its exit
                await retry.pause(error)
                while await self._status() is None:  # replies sooner than the request above, which is a long poll
                    if retry.failing_seconds > HUNG_SECONDS:
                        await self._end_controller()
                    await retry.pause(error)
                continue
            retry.succeeded()
            if silence.over:
                for task in ending.values():
                    task.cancel()
                self._last = await self._status()
                return
            changes = silence.changes
            silent = {(process.role, process.index, process.pid) for process in silence.processes}
            for child in self.children.members:
                if child.role == "controller":
                    continue
                if (child.role, child.process.index, child.pid) not in silent:
                    if child in ending:
                        ending.pop(child).cancel()  # its heartbeats are back
                    continue
                self._joined.add(child.name)  # it may be drained, and so missing in the state at its end
                if child not in ending:
                    ending[child] = self._begin_end(_end_silent(child), child)

    async def _end_controller(self) -> None:
        """End by force the controller, if this launcher started it and it is not just starting."""
        for child in self.children.members:
            if child.role == "controller" and time.monotonic() - child.began > STARTED_SECONDS:
                await child.end_by_force("it has not replied for too long")

    # Calls to the controller

    async def _status(self) -> Status | None:
        try:
            return await self.client.status()
        except StreamRLError as error:  # the controller may be the process that died
            log.debug("the controller does not return its state: %s", error)
            return None

    async def _report_death(self, child: Child) -> None:
        """Report to the controller that a model worker has died, so that the run goes back at once."""
        leave = Leave(role="model_worker", index=child.process.index, pid=child.pid, death=child.reason())
        try:
            await self.client.leave(leave)
        except StreamRLError as error:  # the controller detects the death by itself
            log.debug("the controller does not accept the report of the death of %s: %s", child.name, error)

    async def _report_failure(self, reason: str) -> None:
        """Report to the controller that the run has failed, before survivors report the consequences."""
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                await self.client.finish_run(FinishRun(error=reason), patience=0.0)
        except (StreamRLError, TimeoutError) as error:  # the controller may be the process that died
            log.debug("the reason why the run failed does not reach the controller: %s", error)

    # Failures

    async def _given_up(self, child: Child, status: Status | None, *, before: str = "", after: str = "") -> ProcessDied:
        """Return the error of a launcher that cannot replace `child`, and end the run with it.

        The run continues after the failure of a trainer's process that has never joined it: another host may have its
        place, or the user may start it again."""
        controls = child.role == "controller"
        after = f"; {after}" if after else ""
        unheard = "" if status is not None or controls else "; the controller does not reply"
        died = ProcessDied(f"{before}{child.obituary()}{after}", reason=f"{before}{child.reason()}{after}{unheard}")
        if self.part == "run" or child.name in self._joined:
            await self._report_failure(died.reason)
        return died

    async def _failure(self, first: Child, status: Status) -> ProcessDied:
        """Return the error of a run that has failed; `first` is the first process seen to end.

        A killed process cannot report its own failure. Errors that other processes report afterwards are consequences,
        not causes.
        """
        message = status.message
        killed = next((child for child in (first, *self.children.others_ended()) if child.was_killed), None)
        if killed is not None:
            reason = f"{killed.reason()}; then {message}"
            died = ProcessDied(f"the run failed: {reason}\n{killed.obituary()}", reason=reason)
        else:
            known = self.children.known
            culprit = next((child for child in known if message.startswith(f"{child.name}:")), first)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CULPRIT_SECONDS):
                    await culprit.ended.wait()
            text = f"the run failed: {message}"
            details = "" if culprit.exit_code == 0 else f"\n{culprit.obituary()}"
            died = ProcessDied(text + details, reason=message)
        if self.part != "pool":
            await self._report_failure(died.reason)
        return died


def _where(child: Child) -> str:
    return f"; see {child.log_file}" if child.log_file is not None else ""


async def _end_silent(child: Child) -> None:
    if child.role != "model_worker":  # the run waits for a model worker's end
        await asyncio.sleep(RETURN_SECONDS)
    await child.end_by_force("the controller received no heartbeat from it")


def _successor(child: Child, status: Status | None) -> ProcessStatus | None:
    """Return the process that has taken the place of `child`, a model worker, after the run went back."""
    if status is None or child.role != "model_worker":
        return None
    for process in status.processes:
        if process.state == "live" and _is(process, child):
            return process if (process.pid, process.host) != (child.pid, socket.gethostname()) else None
    return None


def _has_joined(child: Child, status: Status | None) -> bool:
    """Return whether `child` is in the run's state; an unknown state may have every process."""
    return status is None or any(_is(process, child) and process.pid == child.pid for process in status.processes)


def _is(process: ProcessStatus, child: Child) -> bool:
    """Return whether `process` has the role and the index of `child`."""
    return (process.role, process.index) == (child.role, child.process.index)
