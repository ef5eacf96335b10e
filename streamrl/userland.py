"""Child processes for user code: reward functions, agents, metric sinks and taskset listings.

`UserProcesses` calls a function in a few processes, `call_once` calls it in a process of its own without an event loop,
and `run_program` runs a program. A function lives in `python -m streamrl.userland`, which reads `SetupMessage`,
`UserCall` and `Cancel` from standard input and writes `ReadyMessage`, `Alive`, `ResultMessage` and `FailureMessage`
to standard output. Each message is a frame: the length of the body (4 bytes, little endian) and the body in msgpack.

Invariants: user code never gets the two streams, so that its output cannot break the protocol; a process that hangs or
dies is replaced; a process and its whole process group end with the parent, also while user code hangs.

The child imports this module before the user's, possibly in an interpreter that has only msgspec: keep imports few.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import io
import itertools
import logging
import math
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from streamrl.children import describe_exit, kill_group, reading
from streamrl.errors import (
    StreamRLError,
    UserCodeError,
    UserCodeTimeout,
    UserCodeUnusable,
    UserProcessDied,
)
from streamrl.hooks import load_object
from streamrl.waits import cancel

log = logging.getLogger(__name__)

LENGTH_BYTES = 4
MOST_FRAME_BYTES = 1 << 28
START_SECONDS = 120.0
"""Timeout for importing a user's module."""
EXIT_SECONDS = 10.0
"""A process whose output has ended gets this long to exit by itself, with its own exit code."""
REST_SECONDS = 1.0
"""How long output is still read after the end of a process: a daemon that it started may hold the pipe open."""
MOST_ABANDONED = 64
"""Maximum threads of cancelled calls that still run in one process. With one more, the process is replaced."""
AHEAD_SECONDS = 0.005
"""Longest wait of a call in a process for the calls sent with it, if they take as long as recent ones."""
MOST_AHEAD = 64
"""Calls of a plain function that are sent together: one message per call costs more than most reward functions."""
FORGOTTEN = 0.01
"""Share by which the longest call time decays with each shorter call."""
TAIL_LINES = 12

_SECRET = re.compile(r"(^|_)((API)?KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
"""Names of environment variables that look like secrets."""
_PR_SET_PDEATHSIG = 1
_RUN_ELSEWHERE = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("streamrl", sys.argv.pop(1))
sys.modules["streamrl"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Loads the package from its own folder. The folder's other packages, which may have other versions, are not added to
the other interpreter's path."""


# --- messages ---


class SetupMessage(msgspec.Struct, frozen=True, tag="setup"):
    """The function to serve; the reply is `ReadyMessage`, or `FailureMessage` with number -1."""

    loader: str
    """`module:function` in streamrl; called with `settings`, it returns a `UserFunction`."""
    settings: dict[str, Any]
    concurrent_calls: int = 1
    """Calls of a coroutine function that run at the same time."""
    threads: int = 0
    """Calls of a plain function that run at the same time, in a thread each; 0: one by one in the main thread."""
    timeout: float = 0.0
    """Longest time of one call, in seconds, counted from its start in the process; 0: no limit."""
    hang_seconds: float = 2.0
    """A process that does not react for this long hangs; so does a call that does not end after its cancellation."""
    memory_mb: int = 0
    """Maximum address space of the process; 0: no limit."""
    drains: bool = False
    """Whether the process still makes the received calls after its input has ended; otherwise it ends at once."""


class UserCall(msgspec.Struct, frozen=True, tag="call"):
    """Call the function once; the reply is `ResultMessage` or `FailureMessage`."""

    number: int
    payload: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel a call; the call still replies."""

    number: int


class ReadyMessage(msgspec.Struct, frozen=True, tag="ready"):
    """The function is imported."""

    coroutine: bool
    """Whether it is a coroutine function."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The event loop of the process runs; sent several times within `hang_seconds` while calls run."""

    at: float
    """On the machine's monotonic clock, in seconds."""


class ResultMessage(msgspec.Struct, frozen=True, tag="returned"):
    """The result of a call."""

    number: int
    value: Any
    seconds: float
    """Duration of the call."""


class FailureMessage(msgspec.Struct, frozen=True, tag="failed"):
    """The function could not be loaded, raised, returned an invalid value, or was cancelled."""

    message: str
    number: int = -1
    seconds: float = 0.0
    timed_out: bool = False
    stuck: bool = False
    """Whether the call still runs after its cancellation: its process has to be replaced."""


Reply = ReadyMessage | Alive | ResultMessage | FailureMessage
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


@dataclass(frozen=True)
class UserFunction:
    """Result of a `SetupMessage.loader`."""

    function: Callable[..., Any]
    arguments: Callable[[msgspec.Raw], Sequence[Any]]
    """Decodes the payload of a call."""
    result: Callable[[Any], Any]
    """Checks the function's result and makes it encodable; raises `ValueError`."""
    close: Callable[[], None] = lambda: None
    """Called at the end of a process that `drains`."""


def finite_number(value: Any, what: str) -> float:
    """Return what a function returned, `what` it is, as a number; raises `ValueError` if it is not a finite one."""
    try:
        number = float(value)
    except Exception:  # any object may raise anything: a torch tensor with several numbers raises a RuntimeError
        raise ValueError(f"it returned {value!r:.200} ({type(value).__name__}); {what} is a number") from None
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}; {what} is a finite number")
    return number


def frame(message: SetupMessage | UserCall | Cancel | Reply) -> bytes:
    """Return `message` as a frame; raises `TypeError` for values without a msgpack type."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def call_frame(number: int, payload: object) -> bytes:
    """Return a call as a frame; raises `TypeError` or `OverflowError` for values without a msgpack type."""
    return frame(UserCall(number, msgspec.Raw(msgspec.msgpack.encode(payload))))


# --- starting a process ---


def clean_environment(
    variables: Mapping[str, str], *, passed: Collection[str], withheld: Collection[str], python: str = ""
) -> dict[str, str]:
    """Return `variables` for user code, which may run code that a model wrote.

    Variables that look like secrets are left out unless they are `passed`; the `withheld` ones are always left out. The
    programs of the environment of the interpreter `python` come first in the path.
    """
    kept = {
        name: value
        for name, value in variables.items()
        if name not in withheld and (name in passed or not _SECRET.search(name))
    }
    if python:
        kept["PATH"] = os.pathsep.join([str(Path(python).absolute().parent), kept.get("PATH", "")])
    return kept


def child_command(*, python: str = "") -> list[str]:
    """Return the command of a child in the interpreter `python`, which needs msgspec; empty: this interpreter."""
    if not python:
        return [sys.executable, "-m", "streamrl.userland"]
    return [python, "-c", _RUN_ELSEWHERE, str(Path(__file__).with_name("__init__.py").resolve()), "streamrl.userland"]


def _cannot_start(python: str, error: OSError) -> UserCodeUnusable:
    return UserCodeUnusable(f"rollout.agent.python = {python!r} cannot be started: {error.strerror}")


# --- calls in a few processes ---


@dataclass(eq=False)
class _PendingCall:
    number: int
    frame: bytes
    outcome: asyncio.Future[Any]
    begun: Callable[[], None]
    process: _Process | None = None
    alone: bool = False
    """Whether it must run alone: it was one of several calls in a process that died or hung."""
    disturbed: bool = False
    """Whether its process did not react for a while, possibly because of another call."""
    acknowledged: asyncio.Future[UserCodeError | None] | None = None
    """Completed when a cancelled call has ended, with the error if another call may have caused its delay."""

    def settle(self, value: object = None, error: UserCodeError | None = None) -> None:
        if self.acknowledged is not None and not self.acknowledged.done():
            shared = isinstance(error, UserProcessDied) and error.calls > 1
            late = UserCodeError("another call may have blocked its process, and it is late")
            self.acknowledged.set_result(error if shared else late if self.disturbed else None)
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(value)
        else:
            self.outcome.set_exception(error)


@dataclass(eq=False)
class UserProcesses:
    """Calls a user's function in `processes` processes and replaces those that hang or die.

    A plain function runs one call at a time in each process, or `setup.threads`; a coroutine function runs up to
    `setup.concurrent_calls`. Further calls wait, first come, first served.
    """

    setup: SetupMessage
    _: KW_ONLY
    what: str
    """The function's name in errors."""
    processes: int
    environment: Mapping[str, str]
    python: str = ""
    """Another interpreter."""
    repeatable: bool = False
    """If a process with several concurrent calls died or hung, each is made again alone, so that only the culprit
    fails. Otherwise all of them fail, with one error."""

    def __post_init__(self) -> None:
        self._live: set[_Process] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._waiting: deque[_PendingCall] = deque()
        self._numbers = itertools.count()
        self._longest = AHEAD_SECONDS
        self._dispatching = self._closed = False
        self.busy_seconds = 0.0
        """Duration of all calls that have ended."""

    @property
    def coroutine(self) -> bool:
        """Whether the function is a coroutine function; False while it is not loaded."""
        return any(process.coroutine for process in self._live)

    async def start(self) -> None:
        """Start the missing processes; raises `UserCodeUnusable` if the function cannot be loaded."""
        self._closed = False
        self._fill()
        try:
            await asyncio.gather(*self._starting)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every process with its process group, and cancel every call."""
        self._closed = True
        await cancel(*self._starting)
        for process in list(self._live):
            process.kill()
            await process.ended
        for call in self._waiting:
            call.outcome.cancel()
        self._waiting.clear()

    async def call(self, payload: object, *, begun: Callable[[], None] = lambda: None) -> Any:
        """Return the result of the function; `begun` is called when the call is sent to a process.

        Raises `TypeError` or `OverflowError` if `payload` cannot be encoded, `UserCodeError` if the function fails,
        `UserCodeTimeout` if it takes too long, `UserProcessDied` if its process ends, and `UserCodeUnusable` if it
        cannot be loaded. If a call of a coroutine or in a thread is cancelled, the function is cancelled too; the
        `CancelledError` has a cause if another call of the process may have delayed this one.
        """
        number = next(self._numbers)
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = _PendingCall(number, call_frame(number, payload), outcome, begun)
        self._waiting.append(call)
        self._wake()
        try:
            return await outcome
        except asyncio.CancelledError as cancelled:
            process = call.process
            if process is not None and process.concurrent and number in process.outstanding:
                fault = await process.cancel(call)
                if fault is not None:
                    raise cancelled from fault
            raise

    def _wake(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Send waiting calls to processes with room, all calls of one process together.

        Concurrent calls are spread over the processes. Other calls are batched: one large message is cheaper than many.
        """
        self._dispatching = False
        room = {process: self._room(process) for process in self._live if not process.ending}
        batches: dict[_Process, list[_PendingCall]] = {process: [] for process in room}
        while self._waiting:
            call = self._waiting[0]
            if not call.outcome.done():
                free = [process for process, places in room.items() if places > 0 and process.takes(call)]
                if not free:
                    break
                process = (max if free[0].concurrent else min)(free, key=room.__getitem__)
                room[process] -= 1
                process.add(call)
                batches[process].append(call)
            self._waiting.popleft()
        for process, calls in batches.items():
            if calls:
                process.send(b"".join(call.frame for call in calls))
                for call in calls:
                    call.begun()
        self._fill()

    def _room(self, process: _Process) -> int:
        if process.concurrent:
            return process.limit - len(process.outstanding)
        return 0 if process.outstanding else max(1, int(AHEAD_SECONDS / self._longest))

    def _fill(self) -> None:
        """Start the missing processes, without waiting for them."""
        while not self._closed and len(self._live) + len(self._starting) < self.processes:
            task = asyncio.create_task(self._launch(), name=f"start of a process of {self.what}")
            self._starting.add(task)
            task.add_done_callback(self._launched)

    async def _launch(self) -> None:
        process = _Process(self.setup, take=self._take, on_end=self._ended)
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: process,
                *child_command(python=self.python),
                stdin=PIPE,
                stdout=PIPE,
                stderr=None,
                env=dict(self.environment),
                start_new_session=True,
            )
        except OSError as error:
            raise _cannot_start(self.python, error) from error
        try:
            process.send(frame(self.setup))
            async with asyncio.timeout(START_SECONDS):
                await process.ready
        except BaseException as error:
            process.kill()
            await asyncio.shield(process.ended)
            if isinstance(error, TimeoutError):
                message = f"{self.what} was not imported within {START_SECONDS:.0f} s"
                raise UserCodeUnusable(message) from error
            raise

    def _launched(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None or self._starting:
            return
        if self._live:
            log.warning("one of %d processes is missing: %s", self.processes, error)
            return
        for call in self._waiting:
            if not call.outcome.done():
                call.outcome.set_exception(error)
        self._waiting.clear()

    def _take(self, process: _Process, reply: Reply) -> None:
        if isinstance(reply, Alive):
            process.note_alive(reply.at)
        elif isinstance(reply, ReadyMessage):
            process.coroutine = reply.coroutine
            process.ready.set_result(None)
            self._live.add(process)
            self._wake()
        elif not process.ready.done():
            message = (
                reply.message if isinstance(reply, FailureMessage) else "a result came before the function was loaded"
            )
            process.ready.set_exception(UserCodeUnusable(f"{self.what} cannot be loaded: {message}"))
        elif (call := process.outstanding.pop(reply.number, None)) is None:
            process.reject(f"it replied to call {reply.number}, which it does not have")
        else:
            self._took(reply.seconds)
            self._wake()
            if isinstance(reply, ResultMessage):
                call.settle(reply.value)
            elif reply.timed_out:
                call.settle(error=UserCodeTimeout(reply.message))
                if reply.stuck:
                    process.innocent = True
                    process.kill()
            else:
                call.settle(error=UserCodeError(reply.message))

    def _took(self, seconds: float) -> None:
        self.busy_seconds += seconds
        self._longest = max(seconds, (1 - FORGOTTEN) * self._longest, AHEAD_SECONDS / MOST_AHEAD)

    def _ended(self, process: _Process) -> None:
        """Replace a process that has ended: fail the calls that may have ended it, and repeat the others."""
        self._live.discard(process)
        status = describe_exit(process.status)
        if not process.ready.done():
            needs = f" ({self.python} needs the package msgspec)" if self.python else ""
            message = f"{self.what}: its process {status} while it was imported{needs}; its output is above"
            process.ready.set_exception(UserCodeUnusable(message))
        calls = list(process.outstanding.values())
        if self._closed:
            for call in calls:
                call.outcome.cancel()
                call.settle()
        elif calls:
            blamed = [] if process.innocent else calls if process.concurrent else calls[:1]
            if process.concurrent and self.repeatable and len(blamed) > 1:
                blamed = []
                for call in calls:
                    call.alone = True
            if process.late and blamed:
                self._took(self.setup.timeout)
            error = process.error or UserProcessDied(status, calls=len(blamed))
            for call in blamed:
                call.settle(error=error)
            again = calls[len(blamed) :]
            self._waiting.extendleft(call for call in reversed(again) if not call.outcome.done())
            for call in again:
                if call.outcome.done():
                    call.settle()
            self._fill()
            self._wake()


class _Process(asyncio.SubprocessProtocol):
    """One child process, the leader of its own process group, from its start to its end."""

    def __init__(
        self, setup: SetupMessage, *, take: Callable[[_Process, Reply], None], on_end: Callable[[_Process], None]
    ) -> None:
        self._setup = setup
        self._take = take
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._heard = self._alive_at = 0.0
        self._seen: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.SubprocessTransport
        self._cancelling: set[asyncio.Task[UserCodeError | None]] = set()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.coroutine = self.late = self.innocent = self.ending = False
        self.status: int | None = None
        """Exit code; None while it runs."""
        self.error: UserCodeError | None = None
        """Why it was ended by force; None if it was not."""
        self.outstanding: dict[int, _PendingCall] = {}
        """Calls without a reply, by number, in the order in which they were sent."""

    @property
    def concurrent(self) -> bool:
        """Whether several calls may run at the same time."""
        return self.coroutine or self._setup.threads > 0

    @property
    def limit(self) -> int:
        """Maximum number of calls that run at the same time."""
        return self._setup.concurrent_calls if self.coroutine else max(1, self._setup.threads)

    def takes(self, call: _PendingCall) -> bool:
        """Whether `call` may run together with the outstanding calls."""
        first = next(iter(self.outstanding.values()), None)
        return first is None or not (call.alone or first.alone)

    def add(self, call: _PendingCall) -> None:
        """Note a call that is about to be sent."""
        if not self.outstanding:
            self._heard, self._alive_at = self._loop.time(), time.monotonic()
            self._seen.clear()
        call.process = self
        self.outstanding[call.number] = call
        self._seen.add(call.number)
        if self._setup.timeout and self._timer is None:
            self._watch()

    def send(self, data: bytes) -> None:
        """Send frames; drop them if the process is gone, since its end is about to be noticed."""
        pipe = cast("asyncio.WriteTransport | None", self._transport.get_pipe_transport(0))
        if pipe is not None and not pipe.is_closing():
            pipe.write(data)

    async def cancel(self, call: _PendingCall) -> UserCodeError | None:
        """Cancel a call, and end the process if the call does not end; return the error if another call may be its
        cause."""
        call.acknowledged = self._loop.create_future()
        task = asyncio.create_task(self._cancel(call, call.acknowledged))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)
        return await asyncio.shield(task)

    async def _cancel(
        self, call: _PendingCall, acknowledged: asyncio.Future[UserCodeError | None]
    ) -> UserCodeError | None:
        self.send(frame(Cancel(call.number)))
        await asyncio.wait((acknowledged,), timeout=self._setup.hang_seconds)
        if not acknowledged.done():
            self.kill()
        return await acknowledged

    def note_alive(self, at: float) -> None:
        """Note an `Alive`; mark all calls as disturbed if the process did not react for a while with several calls."""
        if at - self._alive_at >= self._setup.hang_seconds and len(self._seen) > 1:
            for call in self.outstanding.values():
                call.disturbed = True
        self._alive_at, self._seen = at, set(self.outstanding)

    def kill(self) -> None:
        """End the process group by force."""
        self.ending = True
        if self.status is None and not kill_group(self._transport.get_pid()):
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()

    def reject(self, reason: str) -> None:
        """End a process that broke the protocol."""
        self.error = UserCodeError(f"its process broke the protocol and was replaced: {reason}")
        self.kill()

    def _watch(self) -> None:
        """End the process if it is silent for longer than a call may take."""
        self._timer = None
        most = self._setup.timeout + (self._setup.hang_seconds if self.concurrent else 0.0)
        left = self._heard + most - self._loop.time()
        if not self.outstanding or self.status is not None:
            return
        if left > 0:
            self._timer = self._loop.call_later(left, self._watch)
        else:
            self.late, self.error = True, UserCodeTimeout("its process was replaced")
            self.kill()

    # --- as asyncio.SubprocessProtocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._heard = self._loop.time()
        self._buffer += data
        begin = 0
        while len(self._buffer) >= (body := begin + LENGTH_BYTES):
            end = body + int.from_bytes(self._buffer[begin:body], "little")
            if end - body > MOST_FRAME_BYTES:
                self.reject(f"a frame of {end - body} bytes")
                break
            if len(self._buffer) < end:
                break
            try:
                reply = _replies.decode(bytes(self._buffer[body:end]))
            except msgspec.DecodeError as error:
                self.reject(str(error))
                break
            self._take(self, reply)
            begin = end
        del self._buffer[:begin]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.ending = True
        if fd == 1:
            self._loop.call_later(EXIT_SECONDS, self.kill)

    def process_exited(self) -> None:
        self.ending = True
        self.status = self._transport.get_returncode()
        kill_group(self._transport.get_pid())
        self._loop.call_later(REST_SECONDS, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.ended.done():  # it is cancelled with the task that awaits it
            self.ended.set_result(None)
        self._on_end(self)


# --- one call, or one program ---


def call_once(
    setup: SetupMessage, payload: object, *, timeout: float, environment: Mapping[str, str], python: str = ""
) -> Any:
    """Return the result of one call in a process of its own.

    Raises `UserCodeUnusable`, `UserCodeError`, `UserCodeTimeout` after `timeout` seconds, or `UserProcessDied`.
    """
    setup = msgspec.structs.replace(setup, drains=True)
    try:
        done = subprocess.run(
            child_command(python=python),
            input=frame(setup) + call_frame(0, payload),
            capture_output=True,
            timeout=timeout,
            env=environment,
            start_new_session=True,
            check=False,
        )
    except OSError as error:
        raise _cannot_start(python, error) from error
    except subprocess.TimeoutExpired as error:
        raise UserCodeTimeout(f"no answer within {timeout:.0f} s") from error
    output, reply = io.BytesIO(done.stdout), None
    while body := _read_body(output):
        reply = _replies.decode(body)
    if isinstance(reply, ResultMessage):
        return reply.value
    if isinstance(reply, FailureMessage):
        raise UserCodeError(reply.message)
    tail = done.stderr.decode(errors="replace").strip()[-2000:]
    raise UserProcessDied(f"{describe_exit(done.returncode)}:\n{tail}", calls=1)


async def run_program(
    words: Sequence[str], *, memory_mb: int, environment: Mapping[str, str], begun: Callable[[int], None]
) -> tuple[int, list[str]]:
    """Run a program with an empty input; return its exit code and the last lines of its output.

    It leads a process group, which ends with it, with this process, and when this call is cancelled. `begun` is called
    with its process id. Raises `OSError` if it cannot be started.
    """
    lines: deque[str] = deque(maxlen=TAIL_LINES)
    printed, end = os.pipe()  # asyncio's own pipe would delay the end of the process while a daemon holds it open
    async with reading(printed) as reader:
        try:
            process = await asyncio.create_subprocess_exec(
                *(*child_command(), str(memory_mb), *words),
                stdin=DEVNULL,
                stdout=end,
                stderr=STDOUT,
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(end)
        begun(process.pid)
        tail = asyncio.create_task(_read_tail(reader, lines), name=f"output of {words[0]}")
        try:
            status = await process.wait()
            kill_group(process.pid)
            await asyncio.wait((tail,), timeout=REST_SECONDS)
        finally:
            await cancel(tail)
            kill_group(process.pid)
            with contextlib.suppress(ProcessLookupError):
                await asyncio.shield(process.wait())
    return status, list(lines)


async def _read_tail(reader: asyncio.StreamReader, lines: deque[str]) -> None:
    """Read the whole output of a program, and keep its last lines that are not empty in `lines`."""
    rest = b""
    try:
        while piece := await reader.read(1 << 16):
            *whole, rest = (rest + piece).split(b"\n")
            rest = rest[-(1 << 16) :]
            lines.extend(line.decode(errors="replace") for line in whole if line.strip())
    finally:
        if rest.strip():
            lines.append(rest.decode(errors="replace"))


# --- in the child ---


def main() -> None:
    """Serve a function, or become the program of the arguments `MEMORY_MB PROGRAM ARGUMENT...`."""
    if len(sys.argv) > 1:
        _become_program(int(sys.argv[1]), sys.argv[2:])
    die_with_parent()
    _end_group_after_death()
    calls_in, replies_out = _take_standard_streams()
    own = os.getpid()

    def reply(message: Reply) -> None:
        if os.getpid() != own:
            os._exit(0)  # user code has forked, and this is the copy
        replies_out.write(frame(message))
        replies_out.flush()

    body = _read_body(calls_in)
    if not body:
        return  # the parent is gone
    setup = msgspec.msgpack.decode(body, type=SetupMessage)
    _limit_memory(setup.memory_mb)
    try:
        code: UserFunction = load_object(setup.loader, key="loader")(**setup.settings)
    except StreamRLError as error:
        reply(FailureMessage(str(error)))
    except Exception as error:  # the user's module may raise any error: the parent reports it
        reply(FailureMessage(_traceback_tail(error)))
    else:
        coroutine = is_coroutine_function(code.function)
        reply(ReadyMessage(coroutine))
        if coroutine or setup.threads:
            asyncio.run(_ConcurrentCalls(setup, code, reply, coroutine=coroutine).serve(calls_in))
        else:
            _serve_in_turn(setup, code, reply, calls_in)


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether calls return coroutines, if that is visible without a call; a method `__call__` counts as well."""
    inner = function.func if isinstance(function, functools.partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _read_body(stream: BinaryIO) -> bytes:
    """Return the body of the next frame; empty at the end of the stream."""
    return stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "little"))


def _read(stream: BinaryIO, take: Callable[[UserCall | Cancel | None], object], *, drains: bool) -> None:
    """Pass each message to `take`, and None at the end of the stream; runs in a thread."""
    decoder = msgspec.msgpack.Decoder(UserCall | Cancel)
    while body := _read_body(stream):
        take(decoder.decode(body))
    if not drains:
        os._exit(0)  # the parent is gone, and the main thread may hang in user code
    take(None)


def _outcome(code: UserFunction, call: UserCall, value: object, began: float) -> ResultMessage | FailureMessage:
    try:
        value = msgspec.Raw(msgspec.msgpack.encode(code.result(value)))
    except (ValueError, TypeError, OverflowError) as error:
        return FailureMessage(str(error), call.number, time.monotonic() - began)
    return ResultMessage(call.number, value, time.monotonic() - began)


def _serve_in_turn(setup: SetupMessage, code: UserFunction, reply: Callable[[Reply], None], calls_in: BinaryIO) -> None:
    """Make one call after another in the main thread, where signals work."""
    calls: queue.SimpleQueue[UserCall | Cancel | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(calls_in, calls.put), kwargs={"drains": setup.drains}, daemon=True).start()
    while (call := calls.get()) is not None:
        if isinstance(call, Cancel):
            continue
        began = time.monotonic()
        try:
            value = code.function(*code.arguments(call.payload))
            if inspect.iscoroutine(value):
                value = _loop().run(value)
        except Exception as error:  # user code may raise any error: the parent reports it
            reply(FailureMessage(_traceback_tail(error), call.number, time.monotonic() - began))
        else:
            reply(_outcome(code, call, value, began))
    code.close()


@functools.cache
def _loop() -> asyncio.Runner:
    """Return the event loop for all calls of a plain function that returns coroutines."""
    return asyncio.Runner()


class _ConcurrentCalls:
    """Calls of a coroutine function, or of a plain function in threads, that run at the same time."""

    def __init__(
        self, setup: SetupMessage, code: UserFunction, reply: Callable[[Reply], None], *, coroutine: bool
    ) -> None:
        self._setup = setup
        self._code = code
        self._reply = reply
        self._coroutine = coroutine
        self._running: dict[int, asyncio.Task[None]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._late: set[int] = set()
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._beating: asyncio.Task[None] | None = None

    async def serve(self, calls_in: BinaryIO) -> None:
        """Serve until the process ends."""
        self._loop = asyncio.get_running_loop()
        if self._setup.threads:
            self._loop.set_default_executor(ThreadPoolExecutor(self._setup.threads + MOST_ABANDONED))

        def take(message: UserCall | Cancel | None) -> None:
            self._loop.call_soon_threadsafe(self._take, message)

        threading.Thread(target=_read, args=(calls_in, take), kwargs={"drains": False}, daemon=True).start()
        await self._loop.create_future()

    def _take(self, message: UserCall | Cancel | None) -> None:
        if isinstance(message, Cancel):
            if (task := self._running.get(message.number)) is not None:
                self._loop.call_soon(task.cancel)  # not before the task has begun, or it would not reply
        elif message is not None:
            if self._beating is None or self._beating.done():
                self._beating = self._loop.create_task(self._beat())
            self._running[message.number] = self._loop.create_task(self._run(message), name=f"call {message.number}")

    async def _beat(self) -> None:
        """Report that the event loop runs, while there are calls."""
        while self._running:
            self._reply(Alive(time.monotonic()))
            await asyncio.sleep(self._setup.hang_seconds / 4)

    async def _run(self, call: UserCall) -> None:
        began = time.monotonic()
        if self._setup.timeout:
            self._timers[call.number] = self._loop.call_later(self._setup.timeout, self._expire, call.number)
        try:
            arguments = self._code.arguments(call.payload)
            value = await (self._code.function(*arguments) if self._coroutine else self._in_thread(arguments))
        except BaseException as error:  # user code may raise any error, and cancel itself: the parent reports it
            late = call.number in self._late
            message = "the call was cancelled" if late else _traceback_tail(error)
            self._reply(FailureMessage(message, call.number, time.monotonic() - began, timed_out=late))
        else:
            self._reply(_outcome(self._code, call, value, began))
        finally:
            del self._running[call.number]
            self._late.discard(call.number)
            if (timer := self._timers.pop(call.number, None)) is not None:
                timer.cancel()

    def _expire(self, number: int) -> None:
        self._late.add(number)
        self._running[number].cancel()
        self._timers[number] = self._loop.call_later(self._setup.hang_seconds, self._report_stuck, number)

    def _report_stuck(self, number: int) -> None:
        message = "its process was replaced"
        self._reply(FailureMessage(message, number, self._setup.timeout, timed_out=True, stuck=True))

    async def _in_thread(self, arguments: Sequence[Any]) -> Any:
        """Call the plain function in a thread. A cancelled call continues there, since a thread cannot be ended."""
        running = asyncio.create_task(asyncio.to_thread(self._code.function, *arguments))
        try:
            value = await asyncio.shield(running)
        except asyncio.CancelledError:
            if not running.done():
                self._abandoned.add(running)
                running.add_done_callback(self._forget)
            if len(self._abandoned) > MOST_ABANDONED:
                sys.stderr.write(f"{len(self._abandoned)} cancelled calls still run: their process ends\n")
                sys.stderr.flush()
                os._exit(1)
            raise
        return await value if inspect.isawaitable(value) else value

    def _forget(self, ended: asyncio.Task[Any]) -> None:
        self._abandoned.discard(ended)
        if not ended.cancelled():
            ended.exception()  # marks it as retrieved


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return the input and output of the process; user code gets an empty input, and standard error as its output."""
    calls_in, replies_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return calls_in, replies_out


def die_with_parent() -> None:
    """On Linux, have the kernel end this process with its parent, even if user code holds the interpreter lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_group_after_death() -> None:
    """On Linux, start a process that waits for the end of this one and then ends its process group.

    If the parent was killed, no other process could do that. It is not a child of this process, because user code may
    wait for all of its own children.
    """
    leader = os.getpid()
    if not hasattr(os, "pidfd_open") or os.getpgrp() != leader:
        return
    if first := os.fork():
        os.waitpid(first, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            watched = os.pidfd_open(leader)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):  # otherwise readers of these pipes would wait for this process
                os.dup2(nothing, descriptor)
            select.select([watched], [], [])
            os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)


def _limit_memory(memory_mb: int) -> None:
    if most := memory_mb << 20:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _become_program(memory_mb: int, words: list[str]) -> None:
    _end_group_after_death()
    _limit_memory(memory_mb)
    die_with_parent()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"cannot be started: {words[0]}: {error.strerror}")


def _traceback_tail(error: BaseException) -> str:
    """Return the last lines of the traceback; characters that are not valid Unicode, as in file names, are escaped."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-TAIL_LINES:]).encode(errors="backslashreplace").decode()


if __name__ == "__main__":
    main()
