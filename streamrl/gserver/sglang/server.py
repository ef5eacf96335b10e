"""A real SGLang server behind the entry of a gserver: start, readiness, supervision and end.

The run's other processes call SGLang's own HTTP API at the registered address, so no token passes through this process;
it only reports SGLang's figures in heartbeats. SGLang also carries out weight updates by itself: it joins the weight
group and writes buckets directly into its weights, so generation pauses for the whole transfer
(`gserver/updates/update.py`).

Owns the child process: its process group, its output and the writing end of its lifeline (see `entry.py`). Invariants:
an address is registered only once the server replies there; after `stop`, or when this process ends in any way, no
process of the child is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import psutil

from streamrl.children import HeldLifeline, describe_exit, end_group, reading, wait_for_group
from streamrl.config import GserverConfig, LimitsConfig, LoraConfig, SecurityConfig
from streamrl.errors import DeadlineExceeded, ModelError, ProcessDied
from streamrl.gserver.sglang.command import Launch, command, environment
from streamrl.gserver.sglang.entry import LIFELINE, STACKS_SIGNAL
from streamrl.gserver.sglang.monitor import Monitor, monitoring
from streamrl.transport.addresses import LOOPBACK, Listening, url_of
from streamrl.transport.keys import GserverKeys
from streamrl.transport.secret import Secret
from streamrl.transport.tls import certificate_files, client_context

log = logging.getLogger(__name__)

ASK_SECONDS = 0.5
"""Interval, in seconds, between two readiness checks; SGLang gives no other sign."""
PROGRESS_SECONDS = 15.0
TAIL_LINES = 30
MOST_LINE_BYTES = 4096
STOP_SECONDS = 0.5
"""Time, in seconds, between SIGTERM and the forced end of SGLang: it checks for a stop only every 5 seconds, and has
nothing to save."""
STACKS_SECONDS = 0.5
"""Time, in seconds, for a hanging process to print its stacks."""


@asynccontextmanager
async def sglang_server(
    settings: GserverConfig,
    limits: LimitsConfig,
    *,
    listening: Listening = LOOPBACK,
    index: int,
    model_dir: Path,
    device: str,
    dtype: str,
    seed: int,
    weight_version: str,
    prompt_cache: bool,
    keys: GserverKeys,
    routed_experts: bool = False,
    encryption: tuple[Secret, SecurityConfig] | None = None,
    lora: LoraConfig | None = None,
    adapter: Path | None = None,
) -> AsyncIterator[SglangServer]:
    """Start a server, wait until it replies, and end it when the context ends.

    Arguments as in `Launch`; `listening`: the address at which it listens, and the one announced to others; `index`:
    the gserver's; `keys`: the keys that callers must present; `encryption`: for TLS, the material of its certificate.
    Raises the errors of `until_ready`, and `ModelError` if SGLang cannot be started.
    """
    stack = ExitStack()
    certificate = tls = None
    if encryption is not None:
        certificate, tls = stack.enter_context(certificate_files(*encryption)), client_context(*encryption)
    reserved = stack.enter_context(reserved_port(listening.at))
    launch = Launch(
        certificate=certificate,
        model_dir=model_dir,
        host=listening.at,
        port=reserved.getsockname()[1],
        device=device,
        dtype=dtype,
        seed=seed % 2**31,
        weight_version=weight_version,
        prompt_cache=prompt_cache,
        lora=lora,
        adapter=adapter,
        routed_experts=routed_experts,
    )
    words = command(settings, launch)
    log.info("starting SGLang: %s", " ".join(words))
    variables = environment(
        device=device,
        threads=settings.threads,
        index=index,
        ranks=settings.sglang.tensor_parallel,
        group_seconds=limits.update_seconds,
        keys=keys,
    )
    scheme = "http" if tls is None else "https"
    try:
        process = await SglangProcess.start(words, variables)
    except BaseException:
        stack.close()
        raise
    try:
        async with monitoring(
            url_of(listening.at, launch.port, scheme=scheme),
            key=keys.generation,
            tls=tls,
            stuck_seconds=limits.stuck_seconds,
            update_seconds=limits.update_seconds,
        ) as monitor:
            server = SglangServer(process, monitor, url=url_of(listening.announced, launch.port, scheme=scheme))
            began = time.monotonic()
            await server.until_ready(timeout=limits.start_seconds)
            log.info("SGLang (pid %d) is ready after %.0f s", process.pid, time.monotonic() - began)
            async with monitor.polling():
                yield server
    finally:
        await asyncio.shield(process.stop())
        stack.close()


def reserved_port(host: str) -> socket.socket:
    """Return a socket bound to a free port of `host`, which the system gives to no process that requests any port.

    A process that requests this port by its number and may reuse addresses, as HTTP servers may, can listen there: the
    socket itself does not listen. (SGLang opens its port only after it has loaded its model and opened many others.)
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError:
        reserved.close()
        raise
    return reserved


class SglangServer:
    """One running server."""

    name = "sglang"

    def __init__(self, process: SglangProcess, monitor: Monitor, *, url: str) -> None:
        self.url = url
        self.process = process
        self._monitor = monitor

    def stats(self) -> dict[str, float]:
        """Return SGLang's figures from the last poll."""
        return self._monitor.stats()

    async def failed(self) -> None:
        """Wait for the server's end and raise `ProcessDied`, or until it no longer replies and raise `PeerLost`."""
        died = asyncio.create_task(self.process.died())
        silent = asyncio.create_task(self._monitor.until_silent())
        try:
            await asyncio.wait({died, silent}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                died.result()
            log.error("SGLang (pid %d) answers nothing; this is where its processes are:", self.process.pid)
            await self.process.tell_stacks()
            silent.result()
        finally:
            for task in (died, silent):
                task.cancel()
            await asyncio.gather(died, silent, return_exceptions=True)

    async def until_ready(self, *, timeout: float) -> None:
        """Wait until the server replies; raises `ProcessDied`, or `DeadlineExceeded` after `timeout` seconds."""
        ready = asyncio.create_task(self._ask_until_ready())
        died = asyncio.create_task(self.process.died())
        try:
            await asyncio.wait({ready, died}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                died.result()
            if not ready.done():
                raise DeadlineExceeded(
                    f"SGLang was not ready within {timeout:g} s (limits.start_seconds); "
                    f"its last line: {self.process.last_line}"
                )
        finally:
            for task in (ready, died):
                task.cancel()
            await asyncio.gather(ready, died, return_exceptions=True)

    async def _ask_until_ready(self) -> None:
        began = told = time.monotonic()
        while not await self._monitor.is_ready():
            await asyncio.sleep(ASK_SECONDS)
            now = time.monotonic()
            if now - told >= PROGRESS_SECONDS:
                told = now
                log.info(
                    "waiting for SGLang to start for %.0f s; its last line: %s",
                    now - began,
                    self.process.last_line[:200],
                )


class SglangProcess:
    """One SGLang server with all processes that it starts."""

    def __init__(self, handle: asyncio.subprocess.Process, *, lifeline: HeldLifeline, output: int) -> None:
        self.pid = handle.pid
        self._handle = handle
        self._lifeline = lifeline
        self._output = output
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._level = logging.DEBUG
        """The level at which its output is logged."""
        self._reading = asyncio.create_task(self._read(), name="output of SGLang")
        self._ending = asyncio.create_task(self._see_end(), name="end of SGLang")

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> SglangProcess:
        """Start `command`; `environment` is added to this process's. Raises `ModelError` if it cannot be run."""
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
                f"SGLang's interpreter {command[0]} cannot be started ({error.strerror}); "
                "set gserver.sglang.python to one that has sglang"
            ) from error
        finally:
            os.close(its_end)
        return cls(handle, lifeline=lifeline, output=output)

    @property
    def last_line(self) -> str:
        """The last line of its output."""
        return self._tail[-1] if self._tail else "nothing yet"

    async def died(self) -> None:
        """Wait for its end and raise `ProcessDied` with the last lines of its output."""
        await asyncio.shield(self._ending)
        lines = "\n".join(f"  {line}" for line in self._tail) or "  (nothing)"
        raise ProcessDied(f"SGLang (pid {self.pid}) {describe_exit(self._handle.returncode)}; its last lines:\n{lines}")

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
                log.log(self._level, "sglang: %s", text)
