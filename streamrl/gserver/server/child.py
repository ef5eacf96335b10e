"""The child process of a gserver whose engine is a server of its own: its start, its output and its end.

Owns its process group, its output and the writing end of its lifeline (`lifeline.py`). Invariant: after `stop`, or when
this process ends in any way, no process of the child is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence

import psutil

from streamrl.children import HeldLifeline, describe_exit, end_group, reading, wait_for_group
from streamrl.errors import DeadlineExceeded, ModelError, PeerLost, ProcessDied
from streamrl.gserver.server.lifeline import LIFELINE, STACKS_SIGNAL
from streamrl.gserver.server.monitor import Monitor
from streamrl.waits import first_of

log = logging.getLogger(__name__)

ASK_SECONDS = 0.5
"""Interval, in seconds, between two readiness checks; the servers give no other sign."""
PROGRESS_SECONDS = 15.0
TAIL_LINES = 30
MOST_LINE_BYTES = 4096
STOP_SECONDS = 0.5
"""Time, in seconds, between SIGTERM and the forced end: the servers check for a stop only every few seconds, and have
nothing to save."""
STACKS_SECONDS = 0.5
"""Time, in seconds, for a hanging process to print its stacks."""


def cores(place: int, threads: int) -> str:
    """Return the `threads` cores of the machine's rank number `place`, as a number or a range."""
    first = place % max((os.cpu_count() or 1) // threads, 1) * threads
    return str(first) if threads == 1 else f"{first}-{first + threads - 1}"


class ServerProcess:
    """One server with all processes that it starts."""

    def __init__(self, handle: asyncio.subprocess.Process, *, title: str, lifeline: HeldLifeline, output: int) -> None:
        self.pid = handle.pid
        self.title = title
        self._handle = handle
        self._lifeline = lifeline
        self._output = output
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._level = logging.DEBUG
        """The level at which its output is logged."""
        self._reading = asyncio.create_task(self._read(), name=f"output of {title}")
        self._ending = asyncio.create_task(self._see_end(), name=f"end of {title}")

    @classmethod
    async def start(cls, title: str, command: Sequence[str], environment: Mapping[str, str]) -> ServerProcess:
        """Start `command`; `environment` is added to this process's. Raises `ModelError` if it cannot be run.

        `title`: the engine, as people write it; in lower case it is the name of its package and of its settings.
        """
        lifeline = HeldLifeline()
        output, its_end = os.pipe()
        try:
            handle = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                # Not asyncio's own pipe: with it the server's end is reported only after all holders have ended.
                stdout=its_end,
                stderr=its_end,
                env={**os.environ, **environment, LIFELINE: str(lifeline.descriptor)},
                pass_fds=[lifeline.descriptor],
            )
        except OSError as error:
            lifeline.close()
            os.close(output)
            raise ModelError(
                f"{title}'s interpreter {command[0]} cannot be started ({error.strerror}); "
                f"set gserver.{title.lower()}.python to one that has {title.lower()}"
            ) from error
        finally:
            os.close(its_end)
        return cls(handle, title=title, lifeline=lifeline, output=output)

    @property
    def last_line(self) -> str:
        """The last line of its output."""
        return self._tail[-1] if self._tail else "nothing yet"

    async def died(self) -> None:
        """Wait for its end and raise `ProcessDied` with the last lines of its output."""
        await asyncio.shield(self._ending)
        lines = "\n".join(f"  {line}" for line in self._tail) or "  (nothing)"
        end = describe_exit(self._handle.returncode)
        raise ProcessDied(f"{self.title} (pid {self.pid}) {end}; its last lines:\n{lines}")

    async def tell_stacks(self) -> None:
        """Have its processes print the stacks of their threads, one after another so that the lines do not mix.

        From then on its output is logged as errors.
        """
        self._level = logging.ERROR
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == self.pid:
                    os.kill(pid, STACKS_SIGNAL)
                    await asyncio.sleep(STACKS_SECONDS)

    async def stop(self) -> None:
        """End it by SIGTERM, and all processes left after `STOP_SECONDS` by force."""
        if not self._ending.done():
            with contextlib.suppress(ProcessLookupError):
                self._handle.terminate()
            await end_group(self._handle, grace=STOP_SECONDS)
        self._lifeline.close()
        await self._ending

    async def _see_end(self) -> None:
        await wait_for_group(self._handle)  # the server's own processes would keep its memory and its pipe
        await self._reading

    async def _read(self) -> None:
        rest = b""
        async with reading(self._output) as reader:
            while chunk := await reader.read(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                self._note(lines)
                if len(rest) > MOST_LINE_BYTES:
                    self._note([rest])
                    rest = b""
        self._note([rest])

    def _note(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            if text := line[:MOST_LINE_BYTES].decode(errors="replace").rstrip():
                self._tail.append(text)
                log.log(self._level, "%s: %s", self.title.lower(), text)


class ChildServer:
    """One running server with its process and its monitor."""

    def __init__(self, process: ServerProcess, monitor: Monitor, *, url: str) -> None:
        self.url = url
        self.name = process.title.lower()
        self.process = process
        self._monitor = monitor

    def stats(self) -> dict[str, float]:
        """Return the server's figures from the last poll."""
        return self._monitor.stats()

    async def failed(self) -> None:
        """Wait for the server's end and raise `ProcessDied`, or until it no longer replies and raise `PeerLost`."""
        try:
            await first_of(self.process.died(), self._monitor.until_silent())
        except PeerLost:
            title, pid = self.process.title, self.process.pid
            log.error("%s (pid %d) answers nothing; this is where its processes are:", title, pid)
            await self.process.tell_stacks()
            raise

    async def until_ready(self, *, timeout: float) -> None:
        """Wait until the server replies; raises `ProcessDied`, or `DeadlineExceeded` after `timeout` seconds."""
        _, ready = await first_of(self.process.died(), self._ask_until_ready(), timeout=timeout)
        if ready.cancelled():
            raise DeadlineExceeded(
                f"{self.process.title} was not ready within {timeout:g} s (limits.start_seconds); "
                f"its last line: {self.process.last_line}"
            )

    async def _ask_until_ready(self) -> None:
        began = told = time.monotonic()
        while not await self._monitor.is_ready():
            await asyncio.sleep(ASK_SECONDS)
            now = time.monotonic()
            if now - told >= PROGRESS_SECONDS:
                told = now
                log.info(
                    "waiting for %s to start for %.0f s; its last line: %s",
                    self.process.title,
                    now - began,
                    self.process.last_line[:200],
                )
