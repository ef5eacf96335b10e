"""What everybody needs who starts child processes: reading their pipes, ending their process groups, saying how they
ended.

A parent that may be killed itself gives each child the reading end of a pipe, the lifeline, whose only writing end is
its own: at end-of-file the child ends itself and its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
