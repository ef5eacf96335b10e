"""The child processes of one launcher: start, stop, and the record of how each one ended.

Owns every child and their lifeline (see `streamrl/children.py`). Invariant: after `stop` no child is left, nor any
process that a child had started in its own process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from streamrl import essential
from streamrl.children import GRACE_SECONDS, LIFELINE, HeldLifeline, describe_exit, reading, wait_for_group
from streamrl.errors import DeadlineExceeded, ProcessDied
from streamrl.launch.process import STACKS_SIGNAL
from streamrl.launch.processes import STOP_ORDER, PlanRole, ProcessPlan
from streamrl.launch.run_folders import last_lines
from streamrl.transport.secret import DESCRIPTOR, Secret

log = logging.getLogger(__name__)

TAIL_LINES = 15


class Child:
    """One process of a launcher."""

    def __init__(
        self,
        process: ProcessPlan,
        handle: Any,
        *,
        pid: int,
        log_file: Path | None,
        log_begin: int = 0,
    ) -> None:
        """`handle`: the `asyncio.subprocess.Process`. `log_begin`: bytes of the log that earlier processes have
        written."""
        self.process = process
        self.pid = pid
        self.log_file = log_file
        self._log_begin = log_begin
        self.began = time.monotonic()
        self.exit_code: int | None = None
        """None: still running; -n: ended by signal n."""
        self.ended = asyncio.Event()
        self.ended_because = ""
        """Why the launcher ended it by force during the run."""
        self._handle = handle

    @property
    def name(self) -> str:
        """Role and index, for example `rollout/0`."""
        return self.process.name

    @property
    def role(self) -> PlanRole:
        return self.process.role

    @property
    def was_killed(self) -> bool:
        """Whether it was killed, but not by its launcher: by a person, or by the kernel for lack of memory."""
        return self.exit_code == -signal.SIGKILL and not self.ended_because

    def send(self, line: str) -> None:
        """Write `line` to its input, which then ends. It was started with `waits`."""
        with contextlib.suppress(OSError, RuntimeError):  # it has ended; uvloop raises RuntimeError
            self._handle.stdin.write(f"{line}\n".encode())
            self._handle.stdin.close()

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
            return f"{text}; it wrote nothing to {self.log_file}"
        return "\n".join([f"{text}; last lines of {self.log_file}:", *(f"  {line}" for line in lines)])

    def reason(self) -> str:
        """Return how it ended, in one line, with the last line of its log if it ended by itself with an error."""
        text = f"{self.name} (pid {self.pid}) {self.how_it_ended}"
        lines = self.obituary().splitlines()[1:]
        return f"{text}: {lines[-1].strip()}" if lines and (self.exit_code or 0) > 0 else text


class Children:
    """All processes of one launcher, which has to `stop` them before it ends."""

    def __init__(self, logs: Path | None, secret: Secret | None = None) -> None:
        """`logs`: folder for their output; None: it goes to the launcher's output. `secret`: the run's secret, which is
        handed to each process."""
        self._secret = secret
        self._logs = logs
        self._lifeline = HeldLifeline()
        self._ends: dict[Child, asyncio.Task[int]] = {}
        self._exits: asyncio.Queue[Child] = asyncio.Queue()

    @property
    def running(self) -> list[Child]:
        return [child for child in self._ends if child.exit_code is None]

    @property
    def members(self) -> list[Child]:
        """The running processes that take part in the run."""
        return [child for child in self.running if child.process.is_member]

    @property
    def known(self) -> list[Child]:
        """All processes that were started, in that order."""
        return list(self._ends)

    @property
    def awaited(self) -> bool:
        """Whether `next_exit` has an end of a process to return, now or later."""
        return bool(self.members) or not self._exits.empty()

    async def start(
        self, process: ProcessPlan, command: Sequence[str], *, waits: bool = False, pass_fds: Sequence[int] = ()
    ) -> Child:
        """Start `process` with `command`; `next_exit` returns it at its end.

        `waits`: it reads a line from its input (`Child.send`). It inherits the descriptors `pass_fds`."""
        log_file = self._log_of(process)
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
                stdin=asyncio.subprocess.PIPE if waits else asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment, LIFELINE: str(self._lifeline.descriptor)},
                pass_fds=[self._lifeline.descriptor, *pass_fds],
                # Its own session: Ctrl-C on the terminal reaches the launcher alone, which stops all in order.
                start_new_session=True,
            )
        child = Child(process, handle, pid=handle.pid, log_file=log_file, log_begin=begin)
        log.debug("%s started as pid %d", child.name, child.pid)
        self._watch(child)
        return child

    async def ask(self, process: ProcessPlan, command: Sequence[str], *, timeout: float) -> str:
        """Start `process` with `command`, and return the one line that it sends (`--answer-fd`).

        Raises `ProcessDied` if it ends without one, `DeadlineExceeded` after `timeout` seconds.
        """
        reader_fd, writer_fd = os.pipe()
        try:
            child = await self.start(process, [*command, "--answer-fd", str(writer_fd)], pass_fds=[writer_fd])
        finally:
            os.close(writer_fd)
        async with reading(reader_fd) as reader:
            try:
                async with asyncio.timeout(timeout):
                    answer = (await reader.readline()).decode().strip()
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"waited {timeout:.0f} s for {process.name} to be ready in vain; look at its log"
                ) from error
        if not answer:
            await child.ended.wait()
            raise ProcessDied(child.obituary())
        return answer

    async def next_exit(self) -> Child:
        """Wait until a process of the run ends; return it."""
        return await self._exits.get()

    def others_ended(self) -> list[Child]:
        """Return the ended processes that `next_exit` has not returned yet; it will not return them."""
        ended = []
        while not self._exits.empty():
            ended.append(self._exits.get_nowait())
        return ended

    async def stop(self) -> None:
        """Stop all processes in order: SIGTERM, and SIGKILL for those still running after `GRACE_SECONDS`. No others
        can be started afterwards."""
        try:
            for roles in STOP_ORDER:
                await self._stop([child for child in self.running if child.role in roles])
            await self._stop(self.running)
            await asyncio.gather(*self._ends.values())
        finally:
            self._lifeline.close()  # a process that still runs ends by itself

    def kill(self) -> None:
        """Kill all processes at once."""
        for child in self.running:
            child.signal(signal.SIGKILL)

    async def _stop(self, children: Collection[Child]) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        ends = [self._ends[child] for child in children]
        if not ends:
            return
        await asyncio.wait(ends, timeout=GRACE_SECONDS)
        for child in children:
            if child.exit_code is None:
                log.warning("%s did not stop within %.0f s: ended by force", child.name, GRACE_SECONDS)
                child.signal(signal.SIGKILL)
        await asyncio.wait(ends)

    def _log_of(self, process: ProcessPlan) -> Path | None:
        return self._logs / process.log_name if self._logs else None

    def _watch(self, child: Child) -> None:
        self._ends[child] = essential.begin(self._see_end(child), name=f"end of {child.name}")

    async def _see_end(self, child: Child) -> int:
        code = await child.wait()
        if child.process.is_member:
            self._exits.put_nowait(child)
        return code
