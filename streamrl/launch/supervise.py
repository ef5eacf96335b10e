"""The processes of a run that a launcher started: start, restart and stop them, and name the cause if the run fails.

Owns every child and their lifeline (see `children.py`). Invariants: the death of any process of the run ends the wait
for its end, either by a restart (of a role in `REPLACED`, since the controller reassigns its work) or by an error that
names the process and shows the last lines of its log; a process in these roles without heartbeats counts as dead, and
is ended; after `stop` no child is left, nor any process that a child had started in its own process group.

Restarts are pure, with times in seconds passed in. At most `most` restarts of one process come within `window`; each
waits twice as long as the one before it, until none is left in the window. A process that has died too often may rest
until the window has moved on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path

from streamrl import essential
from streamrl.children import (
    EXIT_GONE_BACK,
    GRACE_SECONDS,
    LIFELINE,
    HeldLifeline,
    describe_exit,
    reading,
    wait_for_group,
)
from streamrl.config import Config
from streamrl.errors import DeadlineExceeded, ProcessDied, RunStopped, StreamRLError
from streamrl.launch.files import last_lines
from streamrl.launch.process import EXIT_FAILED, STACKS_SIGNAL, Departure
from streamrl.launch.processes import STOP_ORDER, Helper, PlanRole, ProcessPlan
from streamrl.records.metrics import write_ending
from streamrl.retry import Retry
from streamrl.transport.control import Drain, FinishRun, Leave, ProcessStatus, Status
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import DESCRIPTOR, Secret

log = logging.getLogger(__name__)

TAIL_LINES = 15
LONGEST_DELAY_SECONDS = 60.0
MOST_DOUBLINGS = 64
"""Most doublings of the delay before a restart: after a thousand doublings it would overflow a float."""
LEAVE_SECONDS = 10.0
"""Longest time for processes to leave by themselves once the run is over."""
REPLACED: Collection[PlanRole] = ("gserver", "rollout", "model_worker")
"""Roles of processes that are ended when their heartbeats stop: others do their work, or the run goes back to its
latest checkpoint, and another process takes the place."""
RETURN_SECONDS = 5.0
"""Time for a silent gserver or rollout worker to send a heartbeat again before its end begins: after an interruption of
the network the launcher may reach the controller first."""
UNHEARD_SECONDS = 30.0
"""A warning is logged when the controller has not reported the silent processes for this long."""
HUNG_SECONDS = 15.0
"""After this long without a reply the launcher ends the controller, which hangs or was stopped."""
STARTED_SECONDS = 60.0
"""A controller that was started more recently may still be loading."""
TELL_SECONDS = 3.0
"""Longest time for the controller to receive the report that the run has failed."""
ANSWER_SECONDS = 5.0
"""Longest time for the controller to accept a request to end the run."""
STOPPED = "it was asked to end, by Ctrl-C or another signal"
CULPRIT_SECONDS = 12.0
"""Longest time for a process that gave up to end, so that its log is complete. The controller first waits until all
others have the reason."""


# --- children ---


class Child:
    """One process of a launcher."""

    def __init__(
        self,
        process: ProcessPlan | None,
        *,
        name: str,
        handle: asyncio.subprocess.Process,
        log_file: Path | None,
        log_begin: int = 0,
    ):
        """`log_begin`: bytes of the log that earlier processes have written."""
        self.process = process
        """The process's role, index and environment; None for a helper that is not part of the run."""
        self.name = name
        self.pid = handle.pid
        self.log_file = log_file
        self._log_begin = log_begin
        self.began = time.monotonic()
        self.exit_code: int | None = None
        """None: still running; -n: ended by signal n."""
        self.ended = asyncio.Event()
        self.ended_because = ""
        """Why the launcher ended it by force during the run."""
        self._handle = handle

    def signal(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self._handle.send_signal(number)

    async def wait(self) -> int:
        """Wait for its end; then end the processes that it left in its process group."""
        self.exit_code = await wait_for_group(self._handle)
        self.ended.set()
        return self.exit_code

    async def end_by_force(self, why: str) -> None:
        """Make it print its threads' stacks; kill it unless it ends by itself within `GRACE_SECONDS`."""
        self.signal(STACKS_SIGNAL)
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await self.ended.wait()
        except TimeoutError:
            self.ended_because = why
            self.signal(signal.SIGKILL)

    @property
    def how_it_ended(self) -> str:
        """How it ended, in words."""
        return f"was ended, since {self.ended_because}" if self.ended_because else describe_exit(self.exit_code)

    def obituary(self) -> str:
        """Return how it ended, and the last lines of its log."""
        text = f"{self.name} (pid {self.pid}) {self.how_it_ended}"
        if self.log_file is None:
            return text
        lines = last_lines(self.log_file, TAIL_LINES, begin=self._log_begin)
        if not lines:
            return f"{text}; it said nothing in {self.log_file}"
        return "\n".join([f"{text}; last lines of {self.log_file}:", *(f"  {line}" for line in lines)])

    def reason(self) -> str:
        """Return how it ended, in one line, with the last line of its log if it ended by itself with an error."""
        text = f"{self.name} (pid {self.pid}) {self.how_it_ended}"
        said = self.obituary().splitlines()[1:]
        return f"{text}: {said[-1].strip()}" if said and (self.exit_code or 0) > 0 else text


class Children:
    """All processes of one launcher. `stop` them before the launcher ends."""

    def __init__(self, *, logs: Path | None, secret: Secret | None = None) -> None:
        """`logs`: folder for their output; None: it goes to the launcher's output. `secret`: the run's secret, which is
        handed to each process."""
        self._secret = secret
        self._logs = logs
        self._lifeline = HeldLifeline()
        self._ends: dict[Child, asyncio.Task[int]] = {}
        self._exits: asyncio.Queue[Child] = asyncio.Queue()
        self.untold = 0
        """Number of started processes of the run that `next_exit` has not returned yet."""

    @property
    def running(self) -> list[Child]:
        return [child for child in self._ends if child.exit_code is None]

    @property
    def known(self) -> list[Child]:
        """All processes that were started, in that order."""
        return list(self._ends)

    async def start(self, process: ProcessPlan, command: Sequence[str]) -> Child:
        """Start `process` with `command`; `next_exit` returns it at its end."""
        return await self._spawn(process, command)

    async def ask(self, process: ProcessPlan | Helper, command: Sequence[str], *, timeout: float) -> str:
        """Start `process` with `command`, and return the one line that it sends (`--answer-fd`).

        Raises `ProcessDied` if it ends without one, `DeadlineExceeded` after `timeout` seconds.
        """
        reader_fd, writer_fd = os.pipe()
        try:
            child = await self._spawn(process, [*command, "--answer-fd", str(writer_fd)], pass_fds=[writer_fd])
        finally:
            os.close(writer_fd)
        answer = await _read_line(reader_fd, timeout=timeout, waits_for=f"{process.name} to be ready")
        if not answer:
            await child.ended.wait()
            raise ProcessDied(child.obituary())
        return answer

    async def next_exit(self) -> Child:
        """Wait until a process of the run ends; return it."""
        child = await self._exits.get()
        self.untold -= 1
        return child

    def others_ended(self) -> list[Child]:
        """Return the ended processes that `next_exit` has not returned yet; it will not return them."""
        ended = []
        while not self._exits.empty():
            ended.append(self._exits.get_nowait())
        self.untold -= len(ended)
        return ended

    async def stop(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Stop all processes in order: SIGTERM, and SIGKILL for those still running after `grace_seconds`."""
        for roles in STOP_ORDER:
            await self._stop([c for c in self.running if c.process and c.process.role in roles], grace_seconds)
        await self._stop(self.running, grace_seconds)
        await asyncio.gather(*self._ends.values())

    def kill(self) -> None:
        """Kill all processes at once."""
        for child in self.running:
            child.signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the lifeline; processes that are still running end by themselves."""
        self._lifeline.close()

    async def _stop(self, children: Collection[Child], grace_seconds: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        ends = [self._ends[child] for child in children]
        if not ends:
            return
        await asyncio.wait(ends, timeout=grace_seconds)
        for child in children:
            if child.exit_code is None:
                log.warning("%s did not stop within %.0f s: ended by force", child.name, grace_seconds)
                child.signal(signal.SIGKILL)
        await asyncio.wait(ends)

    async def _spawn(
        self, process: ProcessPlan | Helper, command: Sequence[str], *, pass_fds: Sequence[int] = ()
    ) -> Child:
        log_file = self._logs / process.log_name if self._logs else None
        environment = process.environment
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log_file.open("ab")) if log_file else None
            begin = os.fstat(output.fileno()).st_size if output is not None else 0
            if self._secret is not None:
                pipe = stack.enter_context(self._secret.handed_on())
                environment = {**environment, DESCRIPTOR: str(pipe)}
                pass_fds = [*pass_fds, pipe]
            handle = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment, LIFELINE: str(self._lifeline.descriptor)},
                pass_fds=[self._lifeline.descriptor, *pass_fds],
                # Its own session: Ctrl-C on the terminal reaches the launcher alone, which stops all in order.
                start_new_session=True,
            )
        member = process if isinstance(process, ProcessPlan) else None
        child = Child(member, name=process.name, handle=handle, log_file=log_file, log_begin=begin)
        log.debug("%s started as pid %d", child.name, child.pid)
        self.untold += member is not None
        self._ends[child] = essential.begin(self._see_end(child), name=f"end of {child.name}")
        return child

    async def _see_end(self, child: Child) -> int:
        code = await child.wait()
        if child.process is not None:
            self._exits.put_nowait(child)
        return code


async def _read_line(descriptor: int, *, timeout: float, waits_for: str) -> str:
    """Return one line from a pipe, then close it; empty at end-of-file."""
    async with reading(descriptor) as reader:
        try:
            async with asyncio.timeout(timeout):
                return (await reader.readline()).decode().strip()
        except TimeoutError as error:
            raise DeadlineExceeded(f"waited {timeout:.0f} s for {waits_for} in vain; look at its log") from error


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


def restarts_of(config: Config) -> Restarts:
    """Return the counts of restarts of one role's processes, with the limits of `config`."""
    limits = config.restarts
    return Restarts(most=limits.number, window=limits.window_seconds, delay=limits.delay_seconds)


# --- the run ---

GoOn = Callable[[Child, Status | None], Awaitable[bool]]
"""From a child that died, and the run's state if the controller has returned it, to whether the run continues."""


async def never(child: Child, status: Status | None) -> bool:
    """Restart nothing."""
    return False


async def until_finished(children: Children, *, client: ControlClient, goes_on: GoOn = never) -> None:
    """Wait until the run is over, and all children have left it or had time to do so.

    `goes_on` is called for each child that died before the end of the run. Raises `ProcessDied` if the run cannot
    continue, `RunStopped` if a stop was requested, `StreamRLError` if it continues with another process in the place of
    a child.
    """
    told: list[Status] = []

    async def watch() -> None:
        await end_who_is_silent(children, client)  # returns when the run is over
        if (last := await _status(client)) is not None:
            told.append(last)

    watching = essential.begin(watch(), name="the watch over silence")
    try:
        last = await _until_over(children, client, goes_on, told)
    except ProcessDied as died:
        await _tell(client, died.reason)
        raise
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await _let_leave(children)
    if last is not None and last.state == "stopped":
        raise RunStopped(f"the run was stopped: {last.message}")


def save_and_end(config: Config, manager_url: Callable[[], str]) -> list[Departure]:
    """Return the departure that makes the controller write a checkpoint and end the run; empty if the configuration
    gives it no time.

    `manager_url` returns an empty string while there is no controller. The work raises `StreamRLError` if the request
    fails, and `DeadlineExceeded` if the run has not ended within `limits.save_seconds`.
    """
    seconds = config.limits.save_seconds

    async def work() -> None:
        if not (url := manager_url()):
            raise StreamRLError("the run has not begun")
        client = ControlClient.of(config, url, timeout=ANSWER_SECONDS)
        try:
            await client.drain(Drain(role="controller", index=0))
        finally:
            await client.close()
        await asyncio.sleep(seconds)
        raise DeadlineExceeded(f"limits.save_seconds = {seconds:g} have passed")

    return [Departure(work, f"writing a checkpoint, for at most {seconds:g} s")] if seconds else []


@contextlib.contextmanager
def ending_written(run_dir: Path, *, keep_failure: bool = False) -> Iterator[None]:
    """Write the reason of the run's end into its records if the work inside raises; see `write_ending`."""
    try:
        yield
    except asyncio.CancelledError:
        failed = essential.failure()
        write_ending(run_dir, "failed" if failed else "stopped", str(failed) if failed else STOPPED)
        raise
    except RunStopped as stopped:
        write_ending(run_dir, "stopped", str(stopped))
        raise
    except ProcessDied as died:
        write_ending(run_dir, "failed", died.reason)
        raise
    except Exception as error:
        write_ending(run_dir, "failed", f"{type(error).__name__}: {error}", keep_failure=keep_failure)
        raise


async def end_who_is_silent(children: Children, client: ControlClient) -> None:
    """End by force the children that the controller reports as silent, since they hang or were stopped: others do their
    work already, and they are restarted."""
    changes = 0
    retry = Retry("to ask the controller which processes are silent", patience=math.inf, warn_after=UNHEARD_SECONDS)
    ending: dict[Child, asyncio.Task[None]] = {}
    try:
        while True:
            try:
                silence = await client.silence(changes)
            except StreamRLError as error:  # an end of the controller is detected by its exit
                if retry.failing_seconds > HUNG_SECONDS:
                    await _end_controller(children)
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
                        ending.pop(child).cancel()  # its heartbeats are back
                elif child not in ending:
                    ending[child] = asyncio.create_task(_end_silent(child), name=f"end of {child.name}")
    finally:
        for task in ending.values():
            task.cancel()


async def _end_silent(child: Child) -> None:
    if child.process is not None and child.process.role != "model_worker":  # the run waits for a model worker's end
        await asyncio.sleep(RETURN_SECONDS)
    await child.end_by_force("the controller heard nothing of it")


async def _end_controller(children: Children) -> None:
    """End by force the controller, if it is one of `children` and is not just starting."""
    for child in children.running:
        controls = child.process is not None and child.process.role == "controller"
        if controls and time.monotonic() - child.began > STARTED_SECONDS:
            await child.end_by_force("it has not answered for too long")


def was_left_behind(child: Child) -> bool:
    """Return whether a process ended because the run goes back, which is no failure of its own."""
    model_worker = child.process is not None and child.process.role == "model_worker"
    return child.exit_code == EXIT_GONE_BACK or (model_worker and bool(child.ended_because))


def may_go_back(child: Child) -> bool:
    """Return whether the run can go back to a checkpoint after the end of `child`, a model worker or the controller.

    It cannot if the process ended itself by an error, since the error would occur again.
    """
    return was_left_behind(child) or (child.exit_code or 0) < 0


async def tell_death(child: Child, client: ControlClient) -> None:
    """Report to the controller that a model worker has died, so that the run goes back at once."""
    process = child.process
    if process is None or process.role != "model_worker":
        return
    try:
        await client.leave(Leave(role=process.role, index=process.index, pid=child.pid, death=child.reason()))
    except StreamRLError as error:  # the controller detects the death by itself
        log.debug("the controller does not take in the death of %s: %s", child.name, error)


async def _until_over(
    children: Children, client: ControlClient, goes_on: GoOn, told: Sequence[Status]
) -> Status | None:
    """Wait for the end of the controller, or of all children if it is not one of them. Return the last status.

    `told`: the status at the end of the run, if it was received before the controller ended.
    """
    while True:
        child = await children.next_exit()
        assert child.process is not None
        status = await _status(client) or next(iter(told), None)
        state = "unknown" if status is None else status.state
        if status is not None and state == "failed":
            raise await _failure(children, child, status.message)
        # A controller that does not respond may have left already; if it failed, its own exit code shows it.
        over = state in ("finished", "stopped")
        controls = child.process.role == "controller"
        left = child.exit_code == 0 and (over or state == "unknown")
        left = left or (controls and state == "stopped" and child.exit_code == EXIT_FAILED)  # clusters need this code
        if left or (over and not controls):
            if left:
                log.debug("%s left", child.name)
            else:
                log.warning("%s %s when the run was over; nothing of it is lost", child.name, child.how_it_ended)
            if controls or not _members(children):
                return status
        elif child.exit_code == 0 and state == "running" and _is_no_member(child, status) and _may_leave(child):
            log.info("%s has left the run, as it was asked to", child.name)
        elif (successor := _successor(child, status)) is not None:
            raise StreamRLError(
                f"{child.name} (pid {child.pid}) {child.how_it_ended}: process {successor.pid} on {successor.host} has "
                "taken its place; this trainer ends, and the run continues without it"
            )
        elif not (child.exit_code != 0 and await goes_on(child, status)):
            early = "the run was not over, but " if child.exit_code == 0 else ""
            unheard = "" if status is not None or controls else "; the controller does not answer"
            raise ProcessDied(early + child.obituary(), reason=early + child.reason() + unheard)


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
    """Return whether the run continues without `child` if it has left in order."""
    return child.process is not None and child.process.role in ("gserver", "rollout")


async def _status(client: ControlClient) -> Status | None:
    try:
        return await client.status()
    except StreamRLError as error:  # the controller may be the process that died
        log.debug("the controller does not return its state: %s", error)
        return None


def _is_no_member(child: Child, status: Status | None) -> bool:
    names = {f"{process.role}/{process.index}" for process in status.processes} if status is not None else set()
    return child.name not in names


def _successor(child: Child, status: Status | None) -> ProcessStatus | None:
    """Return the process that has taken the place of `child`, a model worker, after the run went back."""
    if status is None or child.process is None or child.process.role != "model_worker":
        return None
    for process in status.processes:
        has_place = process.state == "live" and f"{process.role}/{process.index}" == child.name
        if has_place and (process.pid, process.host) != (child.pid, socket.gethostname()):
            return process
    return None


async def _tell(client: ControlClient, reason: str) -> None:
    """Report to the controller that the run has failed, before survivors report the consequences."""
    try:
        async with asyncio.timeout(TELL_SECONDS):
            await client.finish_run(FinishRun(error=reason), patience=0.0)
    except (StreamRLError, TimeoutError) as error:  # the controller may be the process that died
        log.debug("the reason why the run failed does not reach the controller: %s", error)


async def _failure(children: Children, first: Child, message: str) -> ProcessDied:
    """Return the error of a run that gave up with `message`; `first` is the first process seen to end.

    A killed process cannot report its own failure. Errors that other processes report afterwards are consequences, not
    causes.
    """
    killed = next((child for child in (first, *children.others_ended()) if _was_killed(child)), None)
    if killed is not None:
        told = f"{killed.reason()}; then {message}"
        return ProcessDied(f"the run failed: {told}\n{killed.obituary()}", reason=told)
    culprit = next((child for child in children.known if message.startswith(f"{child.name}:")), first)
    if culprit.exit_code is None:
        with_end = asyncio.create_task(culprit.ended.wait())
        await asyncio.wait([with_end], timeout=CULPRIT_SECONDS)
        with_end.cancel()
    text = f"the run failed: {message}"
    return ProcessDied(text if culprit.exit_code == 0 else f"{text}\n{culprit.obituary()}", reason=message)


def _was_killed(child: Child) -> bool:
    """Return whether it was killed, but not by its launcher: by a person, or by the kernel for lack of memory."""
    return child.exit_code == -signal.SIGKILL and not child.ended_because
