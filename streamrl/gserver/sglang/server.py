"""A real SGLang server behind the entry of a gserver: started, awaited, watched, ended.

Role: SGLang speaks for itself. The run's other processes call its own HTTP API at the address that is
registered, so no token passes through this process; it only reports SGLang's figures in heartbeats.
Owns the child process. Invariant: an address is told only once the server answers there.

Weight updates are SGLang's own too: it joins the weight group and writes buckets straight into its
weights, so generation pauses for the whole transfer (`gserver/weight_update.py`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from streamrl.config import GserverConfig
from streamrl.errors import DeadlineExceeded
from streamrl.gserver.sglang.child import SglangProcess
from streamrl.gserver.sglang.command import Launch, command, environment
from streamrl.gserver.sglang.monitor import Monitor, monitoring

log = logging.getLogger(__name__)

ASK_SECONDS = 0.5
"""Between two questions whether the server is ready: SGLang gives no other sign."""
PROGRESS_SECONDS = 15.0


class SglangServer:
    """One running server."""

    name = "sglang"

    def __init__(self, process: SglangProcess, monitor: Monitor, *, url: str) -> None:
        self.url = url
        self.process = process
        self._monitor = monitor

    def stats(self) -> dict[str, float]:
        """As of the last time that SGLang was asked."""
        return self._monitor.stats()

    async def failed(self) -> None:
        """Wait for the server's end and raise `ProcessDied`, or until it answers no more and raise `PeerLost`."""
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
        """Wait until the server answers; raises `ProcessDied`, or `DeadlineExceeded` after `timeout` seconds."""
        ready = asyncio.create_task(self._ask_until_ready())
        died = asyncio.create_task(self.process.died())
        try:
            await asyncio.wait({ready, died}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                died.result()
            if not ready.done():
                raise DeadlineExceeded(
                    f"SGLang was not ready within {timeout:g} s (gserver.sglang.start_timeout_seconds); "
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
                log.info("waiting for SGLang to start for %.0f s; its last line: %s", now - began, self._last_words())

    def _last_words(self) -> str:
        return self.process.last_line[:200]


@asynccontextmanager
async def sglang_server(
    settings: GserverConfig,
    *,
    index: int,
    model_dir: Path,
    device: str,
    dtype: str,
    seed: int,
    weight_version: str,
    prompt_cache: bool,
    group_seconds: float,
    key: str = "",
) -> AsyncIterator[SglangServer]:
    """A server that answers, and that is gone afterwards. Arguments as in `Launch`, and `group_seconds`: the longest
    wait for the others of a weight group; `key`: what callers must show."""
    launch = Launch(
        model_dir=model_dir,
        port=free_port(settings.host),
        device=device,
        dtype=dtype,
        seed=seed % 2**31,
        weight_version=weight_version,
        prompt_cache=prompt_cache,
    )
    words = command(settings, launch)
    log.info("starting SGLang: %s", " ".join(words))
    variables = environment(
        device=device,
        threads=settings.threads,
        index=index,
        ranks=settings.sglang.tensor_parallel,
        group_seconds=group_seconds,
        key=key,
    )
    process = await SglangProcess.start(words, variables)
    try:
        url = f"http://{settings.host}:{launch.port}"
        async with monitoring(
            url, key=key, stuck_seconds=settings.stuck_seconds, update_seconds=group_seconds
        ) as monitor:
            server = SglangServer(process, monitor, url=url)
            began = time.monotonic()
            await server.until_ready(timeout=settings.sglang.start_timeout_seconds)
            log.info("SGLang (pid %d) is ready after %.0f s", process.pid, time.monotonic() - began)
            async with monitor.asking():
                yield server
    finally:
        await asyncio.shield(process.stop())


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.create_server((host, 0)) as found:
        port: int = found.getsockname()[1]
        return port
