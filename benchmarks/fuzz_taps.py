"""Taps between the processes of a run, which pass messages on unchanged and record them for `fuzz.py`.

The tap before the controller changes one thing. The addresses of processes in registrations, and the controller's own
in replies, are replaced by addresses of taps. So the tap of the controller is all that the others need.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from tests.hostile import Request

STREAM_BYTES = 2 * 2**20
"""Bytes that are kept of one connection."""
CONNECTIONS = 64
"""Connections that are kept of one port."""
KEPT_HEADERS = ("content-type", "x-session-id", "x-api-key", "idempotency-key", "anthropic-version")
GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame of ZMTP 3 (https://rfc.zeromq.org/spec/23)."""


class Taps:
    """All taps of one run. They record messages by role while `recording`."""

    def __init__(self) -> None:
        self.recording = True
        self.keys: set[str] = set()
        """Keys that agents sent to the gateway."""
        self._requests: dict[str, list[Request]] = defaultdict(list)
        self._streams: dict[str, list[bytearray]] = defaultdict(list)
        """Role → bytes of the clients of its port, by connection."""
        self._addresses: dict[str, str] = {}
        """Address of a process → that of the tap before it."""
        self._closing: list[Any] = []
        self._copying: set[asyncio.Task[Any]] = set()

    async def before_controller(self, url: str) -> str:
        """Open the tap of the controller at `url`; return its URL."""
        return await self._serve("controller", url)

    async def before_gateways(self) -> str:
        """Open a proxy of HTTP, by which agents ask the gateways; return its URL."""
        return await self._serve("rollout", "")

    @property
    def tapped(self) -> set[int]:
        """Ports of processes that have a tap before them."""
        return {urlsplit(address).port or 0 for address in self._addresses}

    def requests(self, role: str) -> list[Request]:
        """Requests to the HTTP servers of `role`."""
        found = list(self._requests[role])
        for stream in self._streams[role]:
            found += http_requests(bytes(stream))
        return found

    def messages(self, role: str) -> list[list[bytes]]:
        """Messages to the ZMQ sockets of `role`."""
        return [frames for stream in self._streams[role] for frames in zmq_messages(bytes(stream))]

    def streams(self, role: str) -> list[bytes]:
        """All bytes to them, with those of ZMQ's own protocol, by connection."""
        return [bytes(stream) for stream in self._streams[role]]

    async def close(self) -> None:
        for task in self._copying:
            task.cancel()
        await asyncio.gather(*self._copying, return_exceptions=True)
        for close in reversed(self._closing):
            await close()

    async def _serve(self, role: str, url: str) -> str:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )

        async def forward(request: web.BaseRequest) -> web.Response:
            body = await request.read()
            target = request.raw_path.removeprefix(str(request.url.origin()))
            headers = {name: value for name, value in request.headers.items() if name.lower() in KEPT_HEADERS}
            if self.recording:
                self._requests[role].append(Request(request.method, target, headers, body))
                self.keys |= {request.headers.get("Authorization", "")} if role == "rollout" else set()
            if target == "/register":
                body = await self._with_tap(body)
            shown = {"Authorization": request.headers.get("Authorization", "")}
            to = URL((url or str(request.url.origin())) + target, encoded=True)
            try:
                async with session.request(request.method, to, data=body or None, headers=headers | shown) as reply:
                    kind, answer = reply.content_type, await reply.read()
                    if target.startswith("/topology?role=controller&") and reply.status == HTTPStatus.OK:
                        answer = await self._with_taps(answer)
                    return web.Response(status=reply.status, body=answer, content_type=kind)
            except aiohttp.ClientError as error:  # as if the server itself were gone
                return web.Response(status=502, text=str(error))

        runner = web.ServerRunner(web.Server(forward, access_log=None, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._closing += [session.close, runner.cleanup]
        return "http://{}:{}".format(*runner.addresses[0][:2])

    async def _with_tap(self, registration: bytes) -> bytes:
        """Return the registration of a process with the address of a tap."""
        message = msgspec.json.decode(registration)
        address = await self._tap_of(message["role"], message["address"])
        return msgspec.json.encode(message | {"address": address})

    async def _with_taps(self, topology: bytes) -> bytes:
        """Return the controller's topology with the address of a tap."""
        message = msgspec.json.decode(topology)
        peers = [peer | {"address": await self._tap_of("zmq", peer["address"])} for peer in message["peers"]]
        return msgspec.json.encode(message | {"peers": peers})

    async def _tap_of(self, role: str, address: str) -> str:
        """Return the address of the tap before `address`; empty for an empty one."""
        if address and address not in self._addresses:
            self._addresses[address] = await self._open(role, address)
        return self._addresses.get(address, "")

    async def _open(self, role: str, address: str) -> str:
        parts = urlsplit(address)

        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            kept = bytearray()
            if self.recording and len(self._streams[role]) < CONNECTIONS:
                self._streams[role].append(kept)
            try:
                from_server, to_server = await asyncio.open_connection(parts.hostname, parts.port)
            except OSError:
                writer.close()
                return
            both = (self._copy(reader, to_server, kept), self._copy(from_server, writer, None))
            tasks = [asyncio.create_task(each) for each in both]
            self._copying |= set(tasks)
            try:
                await asyncio.wait(tasks)
            finally:
                self._copying -= set(tasks)

        server = await asyncio.start_server(join, "127.0.0.1", 0)

        async def close() -> None:
            server.close()

        self._closing.append(close)
        return f"{parts.scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None) -> None:
        try:
            while content := await reader.read(2**16):
                if kept is not None and self.recording and len(kept) < STREAM_BYTES:
                    kept += content
                writer.write(content)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


def http_requests(stream: bytes) -> list[Request]:
    """The requests that clients of streamrl and of agents have sent on one connection."""
    found, at = list[Request](), 0
    while (end := stream.find(b"\r\n\r\n", at)) >= 0:
        line, *fields = stream[at:end].decode("latin-1").split("\r\n")
        method, target, _ = line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        begin = end + 4
        at = begin + int(headers.get("content-length", "0"))
        kept = {name: value for name, value in headers.items() if name in KEPT_HEADERS}
        found.append(Request(method, target, kept, stream[begin:at]))
    return found


def zmq_messages(stream: bytes) -> Iterator[list[bytes]]:
    """The messages in `stream`, the bytes from one end of a ZMTP 3 connection, without the commands between them."""
    at, frames = GREETING_BYTES, list[bytes]()
    while at + 2 <= len(stream):
        flags = stream[at]
        width = 8 if flags & LONG else 1
        begin = at + 1 + width
        at = begin + int.from_bytes(stream[at + 1 : begin], "big")
        if at > len(stream):
            return
        if flags & COMMAND:
            continue
        frames.append(stream[begin:at])
        if not flags & MORE:
            yield frames
            frames = []
