"""The HTTP server, byte by byte: framing, limits, refusals, hang-ups, and its end."""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from streamrl.errors import PeerError
from streamrl.transport import http
from streamrl.transport.http import HttpServer, read_body

BODY_LIMIT = 1000


@dataclass
class Echo:
    """Replies with the request: to `/wait` once `go` is set. `/secret` is refused by its head."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/secret":
            return web.Response(body=b"not for you", status=401)
        try:
            body = await read_body(request)
        except PeerError as error:
            return web.Response(text=str(error), status=error.status)
        if request.path == "/wait":
            self.began.set()
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return web.Response(text=f"{request.method} {request.path} {sorted(request.query.items())} {body!r}")


@asynccontextmanager
async def serving(most_body_bytes: int = BODY_LIMIT) -> AsyncIterator[tuple[Echo, HttpServer, int]]:
    echo = Echo()
    server = HttpServer(echo.handle, most_body_bytes=most_body_bytes)
    _, port = await server.listen("127.0.0.1", 0)
    try:
        yield echo, server, port
    finally:
        await server.close(patience=0.1)


def open_connections(server: HttpServer) -> int:
    return len(server._server.connections)


async def ask(port: int, *parts: bytes, answers: int = 1) -> list[tuple[int, str, bytes]]:
    """Status, head and body of each answer to `parts`, sent one after another on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.01)
    found = [await answer_on(reader) for _ in range(answers)]
    writer.close()
    return found


async def send_all(writer: asyncio.StreamWriter, size: int) -> None:
    async with asyncio.timeout(30):
        for _ in range(size // 2**20):
            writer.write(bytes(2**20))
            await writer.drain()


async def answer_on(reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
    async with asyncio.timeout(30):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        return int(head.split()[1]), head, await reader.readexactly(length)


async def test_of_a_name_with_addresses_of_both_kinds_that_of_ipv4_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `localhost` is on many machines. Whoever joined by the other one could not listen for ZMQ."""
    loop = asyncio.get_running_loop()
    create = loop.create_server

    async def create_both(protocol: Any, host: str, port: int, **options: Any) -> Any:
        assert host == "localhost"
        made = [await create(protocol, address, port, **options) for address in ("::1", "127.0.0.1")]
        sockets = [one for server in made for one in server.sockets]
        return SimpleNamespace(sockets=sockets, close=lambda: [server.close() for server in made])

    monkeypatch.setattr(loop, "create_server", create_both)
    server = HttpServer(Echo().handle, most_body_bytes=BODY_LIMIT)
    host, port = await server.listen("localhost", 0)
    assert host == "127.0.0.1"
    ((status, _, _),) = await ask(port, b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    assert status == 200
    await server.close(patience=0.1)


async def test_a_call_is_read_however_its_bytes_come() -> None:
    post = b"POST /a%20b?x=1&y=%2B HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
    reply = b"POST /a b [('x', '1'), ('y', '+')] b'hello'"
    async with serving() as (_, _, port):
        assert [body for _, _, body in await ask(port, *(bytes([byte]) for byte in post))] == [reply], "byte by byte"
        assert [body for _, _, body in await ask(port, post * 3, answers=3)] == [reply] * 3, "all at once"
        assert [body for _, _, body in await ask(port, post, post, answers=2)] == [reply] * 2, "one after another"


async def test_a_body_that_is_announced_is_asked_for() -> None:
    async with serving() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await answer_on(reader))[2] == b"POST / [] b'ok'"
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # by no name
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length : 1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 2**16, 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X: x\r\n" * 2**12, 400),
    ],
)
async def test_bytes_that_are_no_call_are_refused_and_the_connection_closed(
    request_bytes: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes)
        assert (await answer_on(reader))[0] == status
        with suppress(ConnectionError):  # closed although not all was read
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert (await ask(port, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"))[0][0] == 200, "others are answered"
    assert not caplog.records, "a caller cannot fill the log"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + bytes(1001) + b"\r\n0\r\n\r\n",
    ],
)
async def test_a_body_beyond_the_limit_is_refused(request_bytes: bytes) -> None:
    async with serving() as (_, _, port):
        ((status, _, body),) = await ask(port, request_bytes)
        assert (status, b"1000 " in body) == (413, True)


async def test_a_packed_body_is_not_unpacked() -> None:
    """A few bytes of it could fill the memory."""
    async with serving() as (_, _, port):
        packed = zlib.compress(bytes(100))
        head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(packed)
        ((status, _, body),) = await ask(port, head + packed)
        assert (status, body) == (200, f"POST / [] {packed!r}".encode())


async def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.3)
    async with serving() as (_, _, port):
        ((status, _, _),) = await ask(port, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 900\r\n\r\nx")
        assert status == 408


async def test_a_call_that_is_refused_by_its_head_is_answered_before_its_body_comes() -> None:
    async with serving() as (_, _, port):
        whole = b"POST /secret HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nok"
        found = await ask(port, whole * 2 + whole.replace(b"secret", b"x"), answers=3)
        assert [status for status, _, _ in found] == [401, 401, 200], "a body that is there ends no connection"
        for expects in (b"", b"Expect: 100-continue\r\n"):
            head = b"POST /secret HTTP/1.1\r\nHost: h\r\n" + expects + b"Content-Length: 900\r\n\r\n"
            ((status, _, body),) = await ask(port, head)
            assert (status, body) == (401, b"not for you"), expects


async def test_a_refused_body_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is there although the caller still sends, and the connection ends soon after."""
    monkeypatch.setattr(http, "LINGER_SECONDS", 0.2)
    size = 2**40
    async with serving(most_body_bytes=size) as (_, server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /secret HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size)
        assert (await answer_on(reader))[0] == 401
        with pytest.raises(ConnectionError):
            await send_all(writer, size)
        writer.close()
        async with asyncio.timeout(10):
            while open_connections(server):  # noqa: ASYNC110 (tests have no other way to see inside)
                await asyncio.sleep(0.01)


async def test_a_caller_that_takes_no_answers_gets_no_further_ones() -> None:
    """Otherwise the answers would fill the memory. Once the caller takes them, all come, in order."""
    calls = [
        b"POST /%d HTTP/1.1\r\nHost: h\r\nContent-Length: 900\r\n\r\n" % number + bytes(900) for number in range(10_000)
    ]
    async with serving(most_body_bytes=2**24) as (_, server, port):
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(caller, ("127.0.0.1", port))
            sent = 0
            with suppress(TimeoutError):
                while sent < len(calls):
                    async with asyncio.timeout(0.5):
                        await loop.sock_sendall(caller, calls[sent])
                    sent += 1
                    await asyncio.sleep(0)
            assert sent < len(calls), "the server reads no further"
            (connection,) = server._server.connections
            assert connection.transport is not None
            assert connection.transport.get_write_buffer_size() < 2**17  # type: ignore[attr-defined]
            reader, writer = await asyncio.open_connection(sock=caller.dup())
            for number in range(sent):
                assert (await answer_on(reader))[2].startswith(b"POST /%d []" % number)
            writer.close()


async def test_a_connection_whose_answers_are_not_taken_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.3)
    async with serving(most_body_bytes=2**24) as (_, server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % 2**23 + bytes(2**23))
        async with asyncio.timeout(30):
            while not open_connections(server):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while open_connections(server):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.close()


async def test_a_connection_without_a_call_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.3)
    async with serving() as (_, _, port):
        for begun in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: h\r\nX: "):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()


async def test_a_caller_that_hangs_up_cancels_its_call() -> None:
    async with serving() as (echo, server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n")
        await asyncio.wait_for(echo.began.wait(), 10)
        writer.close()
        await asyncio.wait_for(echo.cancelled.wait(), 10)
        await asyncio.sleep(0)
        assert not open_connections(server)


async def test_the_end_answers_running_calls_and_cuts_those_that_do_not_end() -> None:
    for ends in (True, False):
        async with serving() as (echo, server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n")
            await asyncio.wait_for(echo.began.wait(), 10)
            closing = asyncio.create_task(server.close(patience=10.0 if ends else 0.05))
            await asyncio.sleep(0)
            if ends:
                echo.go.set()
                assert (await answer_on(reader))[0] == 200
            await asyncio.wait_for(closing, 20)
            assert echo.cancelled.is_set() == (not ends)
            with pytest.raises(ConnectionError):
                await asyncio.open_connection("127.0.0.1", port)
            writer.close()
