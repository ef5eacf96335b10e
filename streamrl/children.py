"""Child processes: starting them, talking to them in frames over pipes, the lifeline that ends them with their parent,
ending their process groups, saying how they ended.

A frame is the length of its body (4 bytes, little endian) and the body.

A lifeline is a pipe whose only writing end is the parent's: at end-of-file, however the parent ended, the child that
has the reading end ends itself and its process group. Code of the user's could put that off, so a child that runs such
code asks the kernel instead (`die_with_parent`).

`python -m streamrl.children MEMORY_MB PROGRAM ARGUMENT...` becomes a program that ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import logging
import os
import re
import resource
import select
import signal
import sys
import threading
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from streamrl.errors import WireError

log = logging.getLogger(__name__)

LENGTH_BYTES = 4
MOST_FRAME_BYTES = 1 << 28
LIFELINE = "STREAMRL_LIFELINE"
"""Environment variable: file descriptor of the lifeline's reading end."""
GRACE_SECONDS = 5.0
"""Between asking a process to stop and ending it by force."""
EXIT_GONE_BACK = 69
"""Of a process that has to begin from the checkpoint to which the run has gone back."""
EXIT_ORPHANED = 70

_PR_SET_PDEATHSIG = 1
_TRACEBACK_LINES = 12
_SECRET = re.compile(r"(^|_)((API)?KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
"""Names of environment variables that look like secrets."""
_RUN_ELSEWHERE = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("streamrl", sys.argv.pop(1))
sys.modules["streamrl"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""
"""The package is loaded from its own folder; nothing else that lies beside it comes into the path of the other
interpreter, whose packages may have other versions."""


# --- starting ---


def module_command(module: str, *, python: str = "") -> list[str]:
    """Return what runs `module` of streamrl in the interpreter `python`, which may be that of another environment that
    has msgspec but not what streamrl needs else; empty: in this one."""
    if not python:
        return [sys.executable, "-m", module]
    return [python, "-c", _RUN_ELSEWHERE, str(Path(__file__).with_name("__init__.py").resolve()), module]


def module_environment(variables: Mapping[str, str], *, python: str = "") -> dict[str, str]:
    """Return `variables` with the programs of the environment of `python` first in the path."""
    if not python:
        return dict(variables)
    return {**variables, "PATH": os.pathsep.join([str(Path(python).absolute().parent), variables.get("PATH", "")])}


def without_secrets(
    environment: Mapping[str, str], *, passed: Collection[str], withheld: Collection[str]
) -> dict[str, str]:
    """Return `environment` for code that may run what a model wrote.

    Variables that look like secrets are left out unless they are `passed`; those `withheld` are left out in any case.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in withheld and (name in passed or not _SECRET.search(name))
    }


# --- frames ---


@asynccontextmanager
async def reading(descriptor: int) -> AsyncIterator[asyncio.StreamReader]:
    """Read from the pipe `descriptor`, which is closed at the end."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        yield reader
    finally:
        transport.close()


def framed(body: bytes) -> bytes:
    """Return `body` as a frame."""
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next frame; raises `IncompleteReadError` at the end of the pipe, `WireError` for one of
    more than `MOST_FRAME_BYTES`."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
    if length > MOST_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


class FramedChild:
    """A child that is talked to in frames over its standard streams, and leads a process group of its own."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls, words: Sequence[str], *, environment: Mapping[str, str] | None) -> FramedChild:
        """Start `words`; `environment`: None, as this process's. Raises `OSError` if there is no such program."""
        process = await asyncio.create_subprocess_exec(
            *words, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True
        )
        return cls(process)

    def send(self, frame: bytes) -> None:
        """Send a frame; raises `ConnectionError` when the child is gone."""
        if self._stdin.is_closing():
            raise ConnectionError("the process is gone")
        self._stdin.write(frame)

    async def receive(self) -> bytes:
        """Return the body of the next frame; raises as `read_frame` does."""
        return await read_frame(self._stdout)

    async def wait(self) -> int:
        """Wait for its end and end what it left behind; return its exit code."""
        return await wait_for_group(self._process)

    async def end(self, *, grace: float = 0.0) -> int:
        """End it by force; as `end_group`."""
        return await end_group(self._process, grace=grace)


# --- ends ---


def kill_group(leader: int) -> bool:
    """End the process group of `leader` by force; return whether there was one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
        return True
    return False


async def end_group(process: Process, *, grace: float = 0.0) -> int:
    """End by force the process group that `process` leads, with all that it has started; return its exit code.

    One that is ending by itself gets `grace` seconds to leave its own code.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace):
            await process.wait()
    if not kill_group(process.pid):  # it has ended, or was just started and leads no group yet
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.stdin is not None:
        process.stdin.close()
    code = await process.wait()
    for _ in range(3):  # its pipes have ended, too; the event loop closes them in its next rounds
        await asyncio.sleep(0)
    return code


async def wait_for_group(process: Process) -> int:
    """Wait for `process` to end, then end by force what is left of the group that it leads; return its exit code."""
    code = await process.wait()
    kill_group(process.pid)
    return code


def describe_exit(code: int | None) -> str:
    """Return in words how a process with this exit code ended; None: it has not."""
    if code is None:
        return "is still running"
    if code < 0:
        name = signal.Signals(-code).name
        hints = {"SIGKILL": " (out of memory?)", "SIGILL": " (an instruction that this processor does not have?)"}
        return f"was ended by {name}{hints.get(name, '')}"
    if code > 128 and code - 128 in set(signal.Signals):
        return f"was stopped by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


# --- lifelines ---


class HeldLifeline:
    """The parent's end of a lifeline, which any number of its children may be given the other end of."""

    def __init__(self) -> None:
        self.descriptor, self._writing_end = os.pipe()
        """`descriptor`: the reading end, for the child to inherit; it is told the number in its environment."""

    def close(self) -> None:
        """Let go: children that are still there end themselves."""
        os.close(self._writing_end)
        os.close(self.descriptor)


class Lifeline:
    """A child's end of the lifeline: watches whether the launcher that started this process still lives."""

    def __init__(self, descriptor: int, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self._descriptor = descriptor
        self._grace = grace_seconds
        self._cut = False
        self._on_cut: Callable[[], None] | None = None
        self._lock = threading.Lock()
        # A thread, not the event loop: a loop that hangs must not keep the process alive.
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @classmethod
    def from_environment(cls) -> Lifeline | None:
        """Return the lifeline that a launcher handed to this process, if one did; its own children do not see it."""
        descriptor = os.environ.pop(LIFELINE, None)
        return cls(int(descriptor)) if descriptor is not None else None

    def on_cut(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, on the lifeline's thread, when the launcher is gone."""
        with self._lock:
            self._on_cut = callback
            cut = self._cut
        if cut:
            callback()

    def _watch(self) -> None:
        while os.read(self._descriptor, 1):
            pass
        with self._lock:
            self._cut = True
            callback = self._on_cut
        log.error("the launcher is gone; stopping")
        if callback is not None:
            callback()
        threading.Event().wait(self._grace)
        end_at_once(EXIT_ORPHANED)


def end_at_once(code: int) -> None:
    """End this process, and the processes that it started in its own group, without clean-up."""
    if os.getpgrp() == os.getpid() and os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


# --- in a child that runs code of the user's ---


def take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return where calls come in and replies go out; the user's code gets other streams."""
    calls_in = os.fdopen(os.dup(0), "rb")
    replies_out = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return calls_in, replies_out


def die_with_parent() -> None:
    """On Linux, ask the kernel: what the user's code does, such as holding the interpreter lock, cannot put it off."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_the_rest_after_death() -> None:
    """On Linux, leave a process behind that waits for the end of this one and then kills what the function has started.

    Nobody else could, where the rollout worker was killed. It is no child of this process, because the user's code may
    wait for all children of its own.
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
            for descriptor in (0, 1, 2):  # nobody is to wait for the end of what it does not write
                os.dup2(nothing, descriptor)
            select.select([watched], [], [])
            os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)


def traceback_tail(error: BaseException) -> str:
    """Return the last lines of the traceback as text that can be sent: escaped where it is no Unicode, as the names of
    some files are."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-_TRACEBACK_LINES:]).encode(errors="backslashreplace").decode()


def main() -> None:
    """Become the program that the arguments name; its address space is limited to `MEMORY_MB`, unless that is 0."""
    memory_mb, *words = sys.argv[1:]
    end_the_rest_after_death()
    if most := int(memory_mb) << 20:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    die_with_parent()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"cannot be started: {words[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
