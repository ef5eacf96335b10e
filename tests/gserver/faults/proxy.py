"""Stands between the manager and a real gserver, and lets things go wrong at a chosen call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp import web

Fault = Literal["kill", "stop", "error", "nonsense", "lost", "late"]
"""`kill`, `stop`: SIGKILL or SIGSTOP as the call comes. `error`: 500. `nonsense`: something that is no answer; both
without the call. `lost`: the call takes effect and its answer is cut off. `late`: it takes effect, and is never
answered."""


@dataclass
class Armed:
    path: str
    fault: Fault
    skip: int = 0
    """Calls of `path` that go through before."""
    struck: bool = False


class Proxy:
    """One gserver's place in the run: its address stays while processes come and go behind other addresses."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid = 0
        self.target = ""
        self.url = ""
        self.alive = False
        self.paused = False
        self.armed: Armed | None = None
        self._gone = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        armed = self.armed
        strikes = armed is not None and request.path == armed.path and not armed.struck
        if strikes and armed is not None:
            if armed.skip:
                armed.skip -= 1
            else:
                armed.struck = True
                return await self._strike(armed.fault, request, body)
        return await self._forward(request, body)

    async def _strike(self, fault: Fault, request: web.Request, body: bytes) -> web.Response:
        match fault:
            case "kill":
                self.kill()
                return await self._forward(request, body)
            case "stop":
                self.signal(signal.SIGSTOP)
                return await self._forward(request, body)
            case "error":
                return web.Response(status=500, body=b"Internal Server Error")
            case "nonsense":
                return web.Response(body=b"\xff[nonsense")
            case "lost":
                await self._forward(request, body)
                return web.Response(body=b"{")
            case "late":
                await self._forward(request, body)
                await self._gone.wait()
        raise AssertionError("unreachable")

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            try:
                async with session.request(
                    request.method, self.target + request.path, data=body, headers={"Content-Type": "application/json"}
                ) as answer:
                    content = await answer.read()
            except aiohttp.ClientError:
                if request.transport is not None:
                    request.transport.abort()
                raise
        if answer.status == 200 and request.path in ("/pause_generation", "/continue_generation"):
            self.paused = request.path == "/pause_generation"
        return web.Response(status=answer.status, body=content, content_type="application/json")

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.alive = False

    def hang_up(self) -> None:
        """Let go of calls that are never answered."""
        self._gone.set()
        self._gone = asyncio.Event()


@asynccontextmanager
async def listening(proxy: Proxy) -> AsyncIterator[Proxy]:
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path}", proxy.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy.url = "http://127.0.0.1:{1}".format(*runner.addresses[0][:2])
    try:
        yield proxy
    finally:
        proxy.hang_up()
        await runner.cleanup()
