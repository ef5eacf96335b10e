"""Ends of child processes: the lifeline that ends them with their parent, the end of their process groups, and the
description of how they ended.

A lifeline is a pipe with its only writing end in the parent. At end-of-file, however the parent ended, the child with
the reading end ends itself and its process group. User code could delay that, so a child that runs user code relies on
the kernel instead (`userland.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)

LIFELINE = "STREAMRL_LIFELINE"
"""Environment variable: file descriptor of the lifeline's reading end."""
GRACE_SECONDS = 5.0
"""Time between requesting a process to stop and ending it by force."""
EXIT_GONE_BACK = 69
"""Exit code of a process that has to start from the checkpoint to which the run has gone back."""
EXIT_ORPHANED = 70


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


# --- ends ---


def kill_group(leader: int) -> bool:
    """End the process group of `leader` by force; return whether there was one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
        return True
    return False


async def end_group(process: Process, *, grace: float = 0.0) -> int:
    """End by force the process group that `process` leads, with all its processes; return its exit code.

    A process that is already ending gets `grace` seconds to exit with its own code.
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
    """Wait for `process` to end, then end the rest of its process group by force; return its exit code."""
    code = await process.wait()
    kill_group(process.pid)
    return code


def describe_exit(code: int | None) -> str:
    """Return in words how a process with this exit code ended; None: it has not ended."""
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
    """The parent's end of a lifeline; any number of its children may have the other end."""

    def __init__(self) -> None:
        self.descriptor, self._writing_end = os.pipe()
        """`descriptor`: the reading end, for the child to inherit; the environment contains its number."""

    def close(self) -> None:
        """Close the writing end: children that still live end themselves."""
        os.close(self._writing_end)
        os.close(self.descriptor)


class Lifeline:
    """A child's end of the lifeline: watches whether the launcher that started this process still lives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.cut: Future[None] = Future()
        """Done once the launcher is gone; its callbacks run on the lifeline's thread."""
        # A thread, not the event loop: a hanging loop must not keep the process alive.
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @classmethod
    def from_environment(cls) -> Lifeline | None:
        """Return the lifeline that a launcher gave this process, or None; its own children do not inherit it."""
        descriptor = os.environ.pop(LIFELINE, None)
        return cls(int(descriptor)) if descriptor is not None else None

    def _watch(self) -> None:
        while os.read(self._descriptor, 1):
            pass
        log.error("the launcher is gone; stopping")
        self.cut.set_result(None)
        threading.Event().wait(GRACE_SECONDS)
        end_at_once(EXIT_ORPHANED)


def end_at_once(code: int) -> None:
    """End this process, and the processes that it started in its own group, without clean-up."""
    if os.getpgrp() == os.getpid() and os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)
