"""Stands between the manager and a real gserver, and lets things go wrong at a chosen call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp import web

from tests.gserver.updates.faults.places import Place

Fault = Literal["kill", "stop", "error", "nonsense", "lost", "late"]
"""`kill`: the gserver is gone as the call comes; `stop`: its processes are stopped (SIGSTOP). `error`: 500.
`nonsense`: something that is no answer; both without the call. `lost`: the call takes effect and its answer is cut
off. `late`: it takes effect, and is never answered."""

HEADERS = ("Content-Type", "Authorization")


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
        self.url = ""
        self.place: Place | None = None
        self.paused = False
        self.armed: Armed | None = None
        self._hung_up = asyncio.Event()
        self._open: set[asyncio.Transport] = set()

    @property
    def alive(self) -> bool:
        return self.place is not None

    def fill(self, place: Place) -> None:
        """A fresh process answers here."""
        self.place = place
        self.paused = False

    async def handle(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        connection = request.transport
        self._open.add(connection)
        try:
            body = await request.read()
            armed = self.armed
            if armed is not None and request.path == armed.path and not armed.struck:
                if not armed.skip:
                    armed.struck = True
                    return await self._strike(armed.fault, request, body)
                armed.skip -= 1
            return await self._forward(request, body)
        finally:
            self._open.discard(connection)

    async def _strike(self, fault: Fault, request: web.Request, body: bytes) -> web.Response:
        match fault:
            case "kill":
                self.kill()
            case "stop":
                self.stop()
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
                await self._hung_up.wait()
        raise ConnectionAbortedError

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        if self.place is None:
            _cut(request)
            raise ConnectionAbortedError
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            try:
                async with session.request(
                    request.method, self.place.url + request.path, data=body, headers=headers
                ) as answer:
                    content = await answer.read()
            except aiohttp.ClientError:
                _cut(request)
                raise
        if answer.status == 200 and request.path in ("/pause_generation", "/continue_generation"):
            self.paused = request.path == "/pause_generation"
        return web.Response(status=answer.status, body=content, content_type=answer.content_type)

    def stop(self) -> None:
        if self.place is not None:
            self.place.stop()

    def go_on(self) -> None:
        """As it was before `stop`."""
        if self.place is not None:
            self.place.go_on()

    def kill(self) -> None:
        """It is gone, with all its connections."""
        if self.place is not None:
            self.place.kill()
            self.place = None
        for connection in self._open:
            connection.abort()

    def hang_up(self) -> None:
        """Let go of calls that are never answered."""
        self._hung_up.set()
        self._hung_up = asyncio.Event()


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


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
