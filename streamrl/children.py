"""What everybody needs who starts child processes: talking to them in frames over pipes, reading what they print,
ending their process groups, saying how they ended.

A frame is the length of its body (4 bytes, little endian) and the body.

A parent that may be killed itself gives each child the reading end of a pipe, the lifeline, whose only writing end is
its own: at end-of-file the child ends itself and its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import os
import re
import select
import signal
import sys
import traceback
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import BinaryIO

from streamrl.errors import WireError

LENGTH_BYTES = 4
MOST_FRAME_BYTES = 1 << 28

_PR_SET_PDEATHSIG = 1
_TRACEBACK_LINES = 12
_SECRET = re.compile(r"(^|_)((API)?KEYS?|TOKENS?|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
"""Names of environment variables that look like secrets."""


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
    return await process.wait()


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
    """Return the last lines of the traceback."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return "\n".join(lines[-_TRACEBACK_LINES:])
