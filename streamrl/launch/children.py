"""The operating-system processes that a launcher started: starts them, sees them end, stops them.

Owns every child and the writing end of the lifeline (see `launch.process`). Invariant: after
`stop` no child is left, nor anything that a child had started in its own process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from streamrl import essential
from streamrl.children import describe_exit, kill_group, reading
from streamrl.errors import DeadlineExceeded, ProcessDied
from streamrl.launch.files import last_lines
from streamrl.launch.process import GRACE_SECONDS, LIFELINE, STACKS_SIGNAL
from streamrl.launch.processes import STOP_ORDER, ProcessPlan
from streamrl.transport.secret import DESCRIPTOR, Secret

log = logging.getLogger(__name__)

TAIL_LINES = 15


class Child:
    """One process."""

    def __init__(
        self, process: ProcessPlan | None, *, name: str, handle: asyncio.subprocess.Process, log_file: Path | None
    ):
        self.process = process
        """What it is; None for a helper that is not part of the run."""
        self.name = name
        self.pid = handle.pid
        self.log_file = log_file
        self.exit_code: int | None = None
        """None: still running; -n: ended by signal n."""
        self.ended = asyncio.Event()
        self.ended_because = ""
        """Why the launcher ended it by force while the run went on."""
        self._handle = handle

    def signal(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self._handle.send_signal(number)

    async def wait(self) -> int:
        """Wait for its end; then end what it left behind in its process group."""
        self.exit_code = await self._handle.wait()
        kill_group(self.pid)
        self.ended.set()
        return self.exit_code

    async def end_by_force(self, why: str) -> None:
        """Have it say where it is, and end it, unless it ends by itself within `GRACE_SECONDS`."""
        self.signal(STACKS_SIGNAL)
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await self.ended.wait()
        except TimeoutError:
            self.ended_because = why
            self.signal(signal.SIGKILL)

    @property
    def how_it_ended(self) -> str:
        """In words."""
        return f"was ended, since {self.ended_because}" if self.ended_because else describe_exit(self.exit_code)

    def obituary(self) -> str:
        """How it ended, and the last it said."""
        text = f"{self.name} (pid {self.pid}) {self.how_it_ended}"
        if self.log_file is None:
            return text
        lines = last_lines(self.log_file, TAIL_LINES)
        if not lines:
            return f"{text}; its log {self.log_file} is empty"
        return "\n".join([f"{text}; last lines of {self.log_file}:", *(f"  {line}" for line in lines)])


class Children:
    """All processes of one launcher. `stop` them before the launcher ends."""

    def __init__(self, *, logs: Path | None, secret: Secret | None = None) -> None:
        """`logs`: folder for their output; None: it goes where the launcher's goes. `secret`: the run's, which each of
        them is given."""
        self._secret = secret
        self._logs = logs
        self._lifeline, self._lifeline_end = os.pipe()
        self._ends: dict[Child, asyncio.Task[int]] = {}
        self._exits: asyncio.Queue[Child] = asyncio.Queue()
        self.untold = 0
        """How many processes of the run were started whose end `next_exit` has not told."""

    @property
    def running(self) -> list[Child]:
        return [child for child in self._ends if child.exit_code is None]

    @property
    def known(self) -> list[Child]:
        """All that were started, in that order."""
        return list(self._ends)

    async def start(self, process: ProcessPlan, command: Sequence[str], *, pass_fds: Sequence[int] = ()) -> Child:
        """Start `process` with `command`; its end is told by `next_exit`."""
        return await self._spawn(
            command,
            process=process,
            name=process.name,
            log_name=process.log_name,
            environment=process.environment,
            pass_fds=pass_fds,
        )

    async def ask(
        self,
        command: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        process: ProcessPlan | None = None,
        timeout: float,
    ) -> str:
        """Start a process that is to tell one line (`--answer-fd`), and wait for that line.

        Raises `ProcessDied` if it ends without one, `DeadlineExceeded` after `timeout` seconds.
        """
        reader_fd, writer_fd = os.pipe()
        try:
            child = await self._spawn(
                [*command, "--answer-fd", str(writer_fd)],
                process=process,
                name=name,
                log_name=process.log_name if process else f"{name}.log",
                environment=environment,
                pass_fds=[writer_fd],
            )
        finally:
            os.close(writer_fd)
        answer = await _read_line(reader_fd, timeout=timeout, waits_for=f"{name} to be ready")
        if not answer:
            await child.ended.wait()
            raise ProcessDied(child.obituary())
        return answer

    async def next_exit(self) -> Child:
        """Wait until a process of the run ends."""
        child = await self._exits.get()
        self.untold -= 1
        return child

    async def stop(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Stop all, in order: SIGTERM, and SIGKILL for those that are there after `grace_seconds`."""
        for roles in STOP_ORDER:
            await self._stop([c for c in self.running if c.process and c.process.role in roles], grace_seconds)
        await self._stop(self.running, grace_seconds)
        await asyncio.gather(*self._ends.values())

    def kill(self) -> None:
        """End all by force, at once."""
        for child in self.running:
            child.signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of the lifeline; whatever should still be there ends by itself."""
        os.close(self._lifeline)
        os.close(self._lifeline_end)

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
        self,
        command: Sequence[str],
        *,
        process: ProcessPlan | None,
        name: str,
        log_name: str,
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
    ) -> Child:
        log_file = self._logs / log_name if self._logs else None
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log_file.open("ab")) if log_file else None
            if self._secret is not None:
                pipe = stack.enter_context(self._secret.handed_on())
                environment = {**environment, DESCRIPTOR: str(pipe)}
                pass_fds = [*pass_fds, pipe]
            handle = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment, LIFELINE: str(self._lifeline)},
                pass_fds=[self._lifeline, *pass_fds],
                # Its own session: Ctrl-C on the terminal reaches the launcher alone, which stops all in order.
                start_new_session=True,
            )
        child = Child(process, name=name, handle=handle, log_file=log_file)
        log.debug("%s started as pid %d", name, child.pid)
        self.untold += process is not None
        self._ends[child] = essential.begin(self._see_end(child), name=f"end of {name}")
        return child

    async def _see_end(self, child: Child) -> int:
        code = await child.wait()
        if child.process is not None:
            self._exits.put_nowait(child)
        return code


async def _read_line(descriptor: int, *, timeout: float, waits_for: str) -> str:
    """One line from a pipe, which is closed then; empty at end-of-file."""
    async with reading(descriptor) as reader:
        try:
            async with asyncio.timeout(timeout):
                return (await reader.readline()).decode().strip()
        except TimeoutError as error:
            raise DeadlineExceeded(f"waited {timeout:.0f} s for {waits_for} in vain; look at its log") from error
