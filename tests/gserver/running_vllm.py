"""A real vLLM server that the runs of tests join one after another, as a user starts it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp

from streamrl import config as configuration
from streamrl.transport.http import new_session
from tests.e2e.harness import Command, start_command
from tests.gserver.installed import vllm_python
from tests.gserver.running_sglang import MAX_CONTEXT, MAX_RUNNING, SCRATCH, START_SECONDS


class RunningVllm:
    """Started when it is first asked for; `close` ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "socket"
        self._process: Command | None = None

    async def socket(self) -> Path:
        """The socket at which it listens."""
        if self._process is None:
            file = self._folder / "config.toml"
            gserver = {
                "engine": "vllm",
                "dtype": "float32",
                "max_context": MAX_CONTEXT,
                "max_running": MAX_RUNNING,
                "vllm": {"python": vllm_python() or ""},
            }
            config = configuration.from_dict(
                {"model": SCRATCH, "gserver": gserver, "run": {"dir": str(self._folder / "run"), "device": "cpu"}}
            )
            file.write_text(configuration.to_toml(config))
            self._process = start_command(["vllm", str(file), str(self._socket)], fresh=True)
        async with asyncio.timeout(START_SECONDS), new_session(None, unix=self._socket) as session:
            while not await _replies(session):
                assert self._process.running, self._process.output[-4000:]
                await asyncio.sleep(0.2)
        return self._socket

    async def close(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGINT)
            async with asyncio.timeout(60):
                await self._process.ended()
            self._process.end()


async def _replies(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("http://vllm/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
