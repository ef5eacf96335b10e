"""The small HTTP server, spoken to byte by byte: framing, limits, refusals, hang-ups, and its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.transport import http
from streamrl.transport.http import DRAIN_BYTES, MOST_HEAD_BYTES, Answer, Call, HttpServer

BODY_LIMIT = 1000


@dataclass
class Echo:
    """Answers with what it was asked; `/wait` is answered when `go` is set, and `/secret` to nobody."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self, call: Call) -> Answer | None:
        assert not call.body
        return Answer(b"not for you", status=401) if call.path == "/secret" else None

    async def handle(self, call: Call) -> Answer:
        if call.path == "/wait":
            self.began.set()
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return Answer(f"{call.method} {call.path} {sorted(call.query.items())} {call.body!r}".encode())


@asynccontextmanager
async def serving(most_body_bytes: int | None = None) -> AsyncIterator[tuple[Echo, HttpServer, int]]:
    echo = Echo()
    server = HttpServer(
        echo.handle,
        check=echo.check,
        refuse=lambda s, m: Answer(m.encode(), status=s),
        most_body_bytes=BODY_LIMIT if most_body_bytes is None else most_body_bytes,
    )
    _, port = await server.listen("127.0.0.1", 0)
    try:
        yield echo, server, port
    finally:
        await server.close(patience=0.1)


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
    echo = Echo()
    server = HttpServer(echo.handle, refuse=lambda s, m: Answer(m.encode(), status=s), most_body_bytes=BODY_LIMIT)
    host, port = await server.listen("localhost", 0)
    assert host == "127.0.0.1"
    ((status, _, _),) = await ask(port, b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
    assert status == 200
    await server.close(patience=0.1)


async def test_calls_of_every_shape() -> None:
    post = b"POST /a%20b?x=1&y=%2B HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
    said = b"POST /a b [('x', '1'), ('y', '+')] b'hello'"
    async with serving() as (_, _, port):
        assert [body for _, _, body in await ask(port, post)] == [said]
        assert [body for _, _, body in await ask(port, *(bytes([byte]) for byte in post))] == [said], "byte by byte"
        assert [body for _, _, body in await ask(port, post * 3, answers=3)] == [said] * 3, "all at once"
        assert [body for _, _, body in await ask(port, post, post, answers=2)] == [said] * 2, "one after another"
        (_, head, body) = (await ask(port, b"GET / HTTP/1.0\r\n\r\n"))[0]
        assert (body, "Connection: close" in head) == (b"GET / [] b''", True)
        upgrade = b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        assert (await ask(port, upgrade))[0][0] == 200, "it may be ignored"


async def test_what_follows_a_call_and_is_none_is_refused_after_its_answer() -> None:
    async with serving() as (_, _, port):
        found = await ask(port, b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\nnonsense\r\n\r\n", answers=3)
        assert [status for status, _, _ in found] == [200, 200, 400]


async def test_nothing_that_follows_what_is_no_call_is_answered() -> None:
    """Else the answers would not be those of the calls in whose place they come."""
    async with serving() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        writer.write(b"GET /a HTTP/1.1\r\n\r\n" + chunked + b"GET /b HTTP/1.1\r\n\r\n")
        assert [(await answer_on(reader))[0] for _ in range(2)] == [200, 411]
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_a_body_that_is_announced_is_asked_for() -> None:
    async with serving() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
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
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400),
        (b"POST / HTTP/1.1\r\nContent-Length : 1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (MOST_HEAD_BYTES + 1), 431),
    ],
)
async def test_what_is_no_call_is_refused_and_the_connection_closed(request_bytes: bytes, status: int) -> None:
    async with serving() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes)
        assert (await answer_on(reader))[0] == status
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert (await ask(port, b"GET / HTTP/1.1\r\n\r\n"))[0][0] == 200, "others are answered"


async def test_who_is_refused_by_the_head_of_his_call_is_told_so_before_its_body_comes() -> None:
    async with serving() as (_, _, port):
        whole = b"POST /secret HTTP/1.1\r\nContent-Length: 2\r\n\r\nok"
        found = await ask(port, whole * 2 + whole.replace(b"secret", b"x"), answers=3)
        assert [status for status, _, _ in found] == [401, 401, 200], "a body that is there ends no connection"
        for expects in (b"", b"Expect: 100-continue\r\n"):
            head = b"POST /secret HTTP/1.1\r\n" + expects + b"Content-Length: 900\r\n\r\n"
            ((status, text, body),) = await ask(port, head)
            assert (status, body, "Connection: close" in text) == (401, b"not for you", True), expects


async def test_of_a_refused_body_little_is_taken_and_nothing_kept() -> None:
    """The answer is there although the caller goes on sending, and he is cut off soon after."""
    size = 64 * 2**20
    async with serving(most_body_bytes=size) as (_, server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /secret HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
        assert (await answer_on(reader))[0] == 401
        writer.write(bytes(DRAIN_BYTES // 2))
        await writer.drain()
        assert await asyncio.wait_for(reader.read(), 10) == b"", "nothing but the end"
        (connection,) = server.connections
        assert len(connection._body) == len(connection._received) == 0
        with pytest.raises(ConnectionError):
            await send_all(writer, size)
        writer.close()


async def test_of_a_caller_who_takes_no_answers_no_further_calls_are_answered() -> None:
    """Else what he does not take would fill the memory. Once he takes them he has all, in order."""
    calls = [b"POST /%d HTTP/1.1\r\nContent-Length: 900\r\n\r\n" % number + bytes(900) for number in range(10_000)]
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
            (connection,) = server.connections
            assert connection._transport.get_write_buffer_size() < 2**17
            reader, writer = await asyncio.open_connection(sock=caller.dup())
            for number in range(sent):
                assert (await answer_on(reader))[2].startswith(b"POST /%d []" % number)
            writer.close()


async def test_a_connection_whose_answers_nobody_takes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.3)
    async with serving(most_body_bytes=2**24) as (_, server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % 2**23 + bytes(2**23))
        async with asyncio.timeout(30):
            while not server.connections:  # noqa: ASYNC110 (tests have no other way to see inside)
                await asyncio.sleep(0.01)
            while server.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.close()


async def test_a_caller_that_hangs_up_cancels_its_call() -> None:
    async with serving() as (echo, server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /wait HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(echo.began.wait(), 10)
        writer.close()
        await asyncio.wait_for(echo.cancelled.wait(), 10)
        assert not server.connections


async def test_the_end_answers_what_runs_and_cuts_what_does_not_end() -> None:
    for ends in (True, False):
        async with serving() as (echo, server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /wait HTTP/1.1\r\n\r\n")
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
