"""The gserver processes behind the proxies: fresh ones of the embedded engine, or SGLang servers joined again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streamrl.config import Config
from streamrl.gserver.sglang.joined import joined_server
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION
from streamrl.transport.keys import read_key
from tests.gserver.running_sglang import RunningSglang

FORGE = "tests.gserver.updates.faults.forge"
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


@asynccontextmanager
async def embedded_places(config_file: Path, model_dir: Path) -> AsyncIterator[Places]:
    """Forked, one after another, from a process that has loaded everything."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", FORGE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield _Forge(process, config_file, model_dir)
    finally:
        process.kill()
        await process.wait()


class _Forge:
    def __init__(self, process: asyncio.subprocess.Process, config_file: Path, model_dir: Path) -> None:
        self._process = process
        self._order = {"config": str(config_file), "folder": str(model_dir)}

    async def fresh(self, index: int) -> Place:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._order | {"index": index}).encode() + b"\n")
        await self._process.stdin.drain()
        made = json.loads(await asyncio.wait_for(self._process.stdout.readline(), PATIENCE))
        return Place(made["url"], made["pid"], mortal=True)


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
                stuck_seconds=self._config.gserver.stuck_seconds,
                update_seconds=self._config.weights.timeout_seconds,
                key=read_key(self._config.gserver.api_key_env, setting=""),
            )
        )
        return Place(server.url, server.process.pid, mortal=False)
