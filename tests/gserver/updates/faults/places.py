"""The gserver processes behind the proxies: fresh ones of the embedded engine, or SGLang servers joined again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.gserver.server.process import running
from streamrl.gserver.sglang.serving import joined_server
from streamrl.transport.credentials import read_key
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION
from tests.forked import Forked
from tests.gserver.running_sglang import RunningSglang

PATIENCE = 60.0


@dataclass
class Place:
    """What answers behind one proxy."""

    url: str
    pid: int
    mortal: bool
    """Whether `kill` ends its process: one that others need is only cut off, and keeps whatever it was at."""

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.mortal:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.mortal:
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)


class Places(Protocol):
    async def fresh(self, index: int) -> Place:
        """Another process for gserver `index`, with the run's first weights."""


@contextlib.contextmanager
def embedded_places(config_file: Path, model_dir: Path) -> Iterator[Places]:
    with ExitStack() as stack:
        yield _Forks(stack, config_file, model_dir)


class _Forks:
    def __init__(self, stack: ExitStack, config_file: Path, model_dir: Path) -> None:
        self._stack = stack
        self._config_file = config_file
        self._model_dir = model_dir

    async def fresh(self, index: int) -> Place:
        process = self._stack.enter_context(Forked(_serve, [(self._config_file, self._model_dir, index)]))
        (place,) = await asyncio.to_thread(process.take, 1, seconds=PATIENCE)
        return Place(*place, mortal=True)


def _serve(config_file: Path, model_dir: Path, index: int, answers: Connection[Any, Any]) -> None:
    """Be a gserver; answers its URL and the process."""

    async def serve() -> None:
        async with running(configuration.load(config_file), index=index, model_dir=model_dir) as (_, url):
            answers.send((url, os.getpid()))
            await asyncio.Event().wait()

    asyncio.run(serve())


@asynccontextmanager
async def sglang_places(config: Config, running: RunningSglang, model_dir: Path) -> AsyncIterator[Places]:
    """Real SGLang servers, which each run takes as the one before left them."""
    places = _Joined(config, running, model_dir)
    try:
        yield places
    finally:
        for stack in places.stacks.values():
            await stack.aclose()


class _Joined:
    def __init__(self, config: Config, running: RunningSglang, model_dir: Path) -> None:
        self.stacks: dict[int, AsyncExitStack] = {}
        self._config = config
        self._running = running
        self._model_dir = model_dir

    async def fresh(self, index: int) -> Place:
        """As a gserver's process does that is started anew and joins the server again."""
        if index in self.stacks:
            await self.stacks[index].aclose()
        servers = await self._running.servers(self._config.gserver.count)
        server = servers[index]
        self.stacks[index] = AsyncExitStack()
        await self.stacks[index].enter_async_context(
            joined_server(
                server.url,
                model_dir=self._model_dir,
                weight_version=INITIAL_WEIGHT_VERSION,
                max_context=self._config.gserver.max_context,
                prompt_cache=True,
                load_seconds=PATIENCE,
                stuck_seconds=self._config.limits.stuck_seconds,
                update_seconds=self._config.limits.update_seconds,
                key=read_key(self._config.gserver.api_key_env, setting=""),
            )
        )
        return Place(server.url, server.process.pid, mortal=False)
