"""SGLang as a child process: started with a lifeline, heard through a pipe, ended with all it started.

Owns the child's process group, its output and the writing end of the lifeline (see `entry.py`).
Invariant: after `stop`, or when this process ends in whatever way, nothing of the child is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence

import psutil

from streamrl.errors import ModelError, ProcessDied
from streamrl.gserver.sglang.entry import LIFELINE, STACKS_SIGNAL

log = logging.getLogger(__name__)

TAIL_LINES = 30
MOST_LINE_BYTES = 4096
STOP_SECONDS = 2.0
"""Between asking SGLang to stop and ending it by force; less than a gserver itself is given."""
STACKS_SECONDS = 0.5
"""For a process that hangs to say where."""


class SglangProcess:
    """One SGLang server with everything that it starts."""

    def __init__(self, handle: asyncio.subprocess.Process, *, lifeline: int, output: int) -> None:
        self.pid = handle.pid
        self._handle = handle
        self._lifeline = lifeline
        self._output = output
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._level = logging.DEBUG
        """At which its output is logged."""
        self._reading = asyncio.create_task(self._read(), name="output of SGLang")
        self._ending = asyncio.create_task(self._see_end(), name="end of SGLang")

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> SglangProcess:
        """Start `command`; `environment` is added to this process's. Raises `ModelError` if it cannot be run."""
        lifeline, our_end = os.pipe()
        output, its_end = os.pipe()
        try:
            handle = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                # Not asyncio's own pipe: with that one the server's end is not told before all who hold it have ended.
                stdout=its_end,
                stderr=its_end,
                env={**os.environ, **environment, LIFELINE: str(lifeline)},
                pass_fds=[lifeline],
            )
        except OSError as error:
            os.close(our_end)
            os.close(output)
            raise ModelError(
                f"SGLang's interpreter {command[0]} cannot be started ({error.strerror}); "
                "set gserver.sglang.python to one that has sglang"
            ) from error
        finally:
            os.close(lifeline)
            os.close(its_end)
        return cls(handle, lifeline=our_end, output=output)

    @property
    def last_line(self) -> str:
        """The last that it said."""
        return self._tail[-1] if self._tail else "nothing yet"

    async def died(self) -> None:
        """Wait for its end and raise `ProcessDied` with the last that it said."""
        await asyncio.shield(self._ending)
        code = self._handle.returncode
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        lines = "\n".join(f"  {line}" for line in self._tail) or "  (nothing)"
        raise ProcessDied(f"SGLang (pid {self.pid}) ended with {how}; its last lines:\n{lines}")

    async def tell_stacks(self) -> None:
        """Have its processes print what their threads are doing, one after another lest the lines mingle.

        From now on its output is logged as errors.
        """
        self._level = logging.ERROR
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == self.pid:
                    os.kill(pid, STACKS_SIGNAL)
                    await asyncio.sleep(STACKS_SECONDS)

    async def stop(self) -> None:
        """End it: by SIGTERM, and by force what is there after `STOP_SECONDS`."""
        if not self._ending.done():
            with contextlib.suppress(ProcessLookupError):
                self._handle.terminate()
            await asyncio.wait({self._ending}, timeout=STOP_SECONDS)
        if not self._ending.done():
            self._kill_group()
        os.close(self._lifeline)
        await self._ending

    async def _see_end(self) -> None:
        await self._handle.wait()
        self._kill_group()  # the server's own processes, which would keep its memory and its pipe
        await self._reading

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has ended, or was just started and leads no group yet
            with contextlib.suppress(ProcessLookupError):
                self._handle.kill()

    async def _read(self) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._output, "rb", buffering=0)
        )
        rest = b""
        try:
            while chunk := await reader.read(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                self._hear(lines)
                if len(rest) > MOST_LINE_BYTES:
                    self._hear([rest])
                    rest = b""
        finally:
            transport.close()
        self._hear([rest])

    def _hear(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            if text := line[:MOST_LINE_BYTES].decode(errors="replace").rstrip():
                self._tail.append(text)
                log.log(self._level, "sglang: %s", text)
