"""Typed JSON over HTTP: one call, one Struct in, one Struct out, one deadline; and a small server for such calls.

The server is for a process that replies to thousands of short calls each second. It knows what they need and nothing
else: keep-alive connections, one call at a time on each, bodies with a `Content-Length`. httptools (llhttp, the parser
of Node.js) parses; a general web server around it spends several times as much on a call (`benchmarks/bench_http.py`).
It owns its connections. Invariants: a caller that hangs up cancels its call; nothing is read into memory beyond the
limits, and no body of a call that its head alone has refused; of a caller who does not take his answers no further call
is answered; after `close` no call runs.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import logging
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import aiohttp
import httptools
import msgspec

from streamrl.errors import UNDECODABLE, DeadlineExceeded, NotOfRun, PeerError, PeerLost, WireError

# --- calls ---

Reply = TypeVar("Reply")

_encoder = msgspec.json.Encoder()
_END_OF_EVENT = b"\n\n"
_DATES = (9, 10)
"""What OpenSSL says of a certificate that is not valid yet, or no longer (`X509_V_ERR_CERT_NOT_YET_VALID`,
`X509_V_ERR_CERT_HAS_EXPIRED`)."""


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """Description of the error."""

    message: str
    retry_seconds: float = 0.0
    """As in `PeerError`."""


class ErrorReply(msgspec.Struct, frozen=True):
    """Body of every answer with a status of 400 or above."""

    error: ErrorDetail


def new_session(
    tls: ssl.SSLContext | None, *, headers: Mapping[str, str] | None = None, connect_seconds: float | None = None
) -> aiohttp.ClientSession:
    """Return a session of any number of connections, without a limit of its own on what is asked. `tls`: what servers
    are known by that are encrypted; `connect_seconds`: how long one may take to let itself be connected to."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds),
        headers=headers,
    )


async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: msgspec.Struct | None,
    reply: type[Reply],
    *,
    timeout: float,
    peer: str,
    if_empty: Reply | None = None,
    headers: Mapping[str, str] | None = None,
    confidential: bool = False,
) -> Reply:
    """Send `body` as JSON and decode the answer as `reply`; an empty answer stands for `if_empty`, if that is given.

    `headers` are added to those of the session. `peer` names the other side in errors; no error quotes an answer that
    is `confidential`. Raises `PeerError` for an answer of 400 or above, `PeerLost` when the peer cannot be reached
    (`NotOfRun` when it is none of the run's), `DeadlineExceeded` after `timeout` seconds, `WireError` when the answer
    is not a `reply`.
    """
    async with _answered(session, method, url, body, timeout=timeout, peer=peer, headers=headers) as response:
        content = await response.read()
    if not content and if_empty is not None:
        return if_empty
    try:
        return msgspec.json.decode(content, type=reply)
    except UNDECODABLE as error:
        said = "" if confidential else f"; it said {content[:200]!r}"
        raise WireError(
            f"{peer} answered {method} {url} with something else than a {reply.__name__}: {error}{said}"
        ) from error


async def follow(
    session: aiohttp.ClientSession,
    url: str,
    body: msgspec.Struct,
    on_event: Callable[[bytes], None],
    *,
    timeout: float,
    peer: str,
) -> None:
    """Post `body` as JSON, and hand the data of each server-sent event of the answer to `on_event` as it comes.

    Raises as `call` does (`WireError` for an answer that is no stream of events), and `PeerLost` when the answer
    breaks off before its `[DONE]`.
    """
    async with _answered(session, "POST", url, body, timeout=timeout, peer=peer) as response:
        if response.content_type != "text/event-stream":
            said = (await response.content.read(200))[:200]
            raise WireError(f"{peer} answered POST {url} with something else than events; it said {said!r}")
        received, searched = bytearray(), 0
        async for content in response.content.iter_any():
            received += content
            while (end := received.find(_END_OF_EVENT, searched)) >= 0:
                data = bytes(received[:end]).removeprefix(b"data:").strip()
                del received[: end + len(_END_OF_EVENT)]
                searched = 0
                if data == b"[DONE]":
                    return
                on_event(data)
            searched = max(0, len(received) - len(_END_OF_EVENT) + 1)  # nothing twice: an event may have many megabytes
    raise PeerLost(f"{peer} broke its answer to POST {url} off")


@asynccontextmanager
async def _answered(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: msgspec.Struct | None,
    *,
    timeout: float,
    peer: str,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer, if its status is below 400; `timeout` includes the time in which the caller reads it."""
    data = _encoder.encode(body) if body is not None else None
    shown = dict(headers or ())
    if data is not None:
        shown["Content-Type"] = "application/json"
    try:
        async with asyncio.timeout(timeout), session.request(method, url, data=data, headers=shown) as response:
            if response.status >= 400:
                told = _error_told(await response.read())
                raise PeerError(
                    f"{peer} answered {response.status} to {method} {url}: {told.message}",
                    status=response.status,
                    retry_seconds=told.retry_seconds,
                )
            yield response
    except aiohttp.ConnectionTimeoutError as error:
        raise PeerLost(
            f"{peer} cannot be reached at {url}: nobody answers; is that machine up, and does a firewall drop what is "
            f"sent to port {urlsplit(url).port}?"
        ) from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"{peer} did not answer {method} {url} within {timeout:g} s") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise NotOfRun(f"{peer} cannot be believed at {url}: {_distrusted(error.certificate_error)}") from error
    except aiohttp.ClientConnectorSSLError as error:
        raise PeerLost(
            f"{peer} speaks no TLS at {url} ({error}): is security.encryption the same there, or does another program "
            "listen at this port?"
        ) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise PeerLost(f"{peer} cannot be reached at {url}: {error or type(error).__name__}") from error


def _distrusted(error: Exception) -> str:
    """Return why a certificate is not believed, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _DATES:
        now = datetime.datetime.now(datetime.UTC)
        return f"{error.verify_message}, by this machine's clock, which says {now:%Y-%m-%d %H:%M} UTC; set it"
    reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)
    return (
        f"its certificate is not one of this run's ({reason}). Either this process has another secret, or none "
        "(STREAMRL_SECRET, security.secret_file: docs/security.md), or another run's server listens at this port"
    )


def _error_told(content: bytes) -> ErrorDetail:
    try:
        return msgspec.json.decode(content, type=ErrorReply).error
    except UNDECODABLE:
        return ErrorDetail(content[:500].decode(errors="replace"))


# --- the server ---

log = logging.getLogger(__name__)

MOST_HEAD_BYTES = 32 * 2**10
IDLE_SECONDS = 120.0
"""A connection without a call for this long is closed."""
DRAIN_BYTES = 256 * 2**10
DRAIN_SECONDS = 1.0
"""What a refused caller goes on sending is thrown away, up to this much and for this long, before the connection is
closed: closed at once, it might lose the answer that says why."""


class Hosts:
    """Tells requests that a web page may have forged: a browser says in `Origin` which page asks, and in `Host` by what
    name the page knows this server, which is a name of the attacker's where it was made to mean this machine (DNS
    rebinding). Whoever asks from a program shows no origin."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """`names`: by which the server may be asked, besides addresses, `localhost` and the machine's own name."""
        self._names = {name.lower() for name in (*names, "localhost", socket.gethostname())}
        self._good: set[str] = set()

    def forged(self, host: str | None, origin: str | None) -> str:
        """Return why a request with these headers is refused; empty if it is not."""
        if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
            return f"a page of {origin[:100]!r} may not ask this server"
        if host is None or host in self._good:
            return ""
        if not self._is_ours(host):
            return f"this server is not called {host[:100]!r} (security.host_names)"
        if len(self._good) < 64:
            self._good.add(host)
        return ""

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Call:
    """One request."""

    __slots__ = ("body", "headers", "member", "method", "path", "query_text")

    def __init__(self, method: str, target: str, headers: dict[str, str]) -> None:
        self.method = method
        path, _, self.query_text = target.partition("?")
        self.path = unquote(path) if "%" in path else path
        self.headers = headers
        """By name in lower case."""
        self.body = b""
        """Complete once the call is handled; empty while its head is checked."""
        self.member: Any = None
        """The member of the run that has proved to be the caller, where the server wants to know."""

    @property
    def query(self) -> dict[str, str]:
        """The part of the URL after `?`, by name."""
        return dict(parse_qsl(self.query_text, keep_blank_values=True))


class Answer:
    """What a call is answered with."""

    __slots__ = ("body", "content_type", "status")

    def __init__(self, body: bytes, *, status: int = 200, content_type: str = "application/json") -> None:
        self.body = body
        self.status = status
        self.content_type = content_type

    def encode(self, *, keep_alive: bool) -> bytes:
        """Return the answer as it goes over the connection."""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"Content-Type: {self.content_type}\r\nContent-Length: {len(self.body)}\r\n"
            f"{'' if keep_alive else 'Connection: close' + chr(13) + chr(10)}\r\n"
        )
        return head.encode() + self.body


Handler = Callable[[Call], Awaitable[Answer]]
Check = Callable[[Call], Answer | None]
"""Returns the answer to a call that is refused by its head; None: its body may come."""
Refuse = Callable[[int, str], Answer]


class HttpServer:
    """A small HTTP/1.1 server.

    `check` is given the head of each call before its body is read, and may refuse it; `handle` then answers the call.
    Neither may raise. `refuse` makes the answer to a request that is not valid HTTP.
    """

    def __init__(
        self, handle: Handler, *, refuse: Refuse, most_body_bytes: int, check: Check = lambda call: None
    ) -> None:
        self.handle = handle
        self.check = check
        self.refuse = refuse
        self.most_body_bytes = most_body_bytes
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Start to listen, and return host and port, those of IPv4 if there are any. `tls`: the server's certificate;
        None: connections are not encrypted. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self, loop), host, port, backlog=4096, ssl=tls)
        # of a name with addresses of both kinds, each of which has a socket: ZMQ speaks IPv4 here
        address = min((own.getsockname() for own in self._server.sockets), key=lambda place: ":" in place[0])
        return address[0], address[1]

    async def close(self, *, patience: float) -> None:
        """No further call; those that run have `patience` seconds to end."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.finish()
        running = [c.running for c in self.connections if c.running is not None]
        if running:
            await asyncio.wait(running, timeout=patience)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    """One connection; `on_...` are called by the parser, from within `_feed`."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.running: asyncio.Task[None] | None = None
        self._server = server
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._received = bytearray()  # while a call runs, and not looked at yet
        self._waiting: deque[tuple[Call, Answer | None, bool]] = deque()
        """Calls that came in one piece, the answer to each that is refused, and whether others may follow."""
        self._refusal: Answer | None = None  # of what comes after them
        self._target = ""
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._call: Call | None = None  # whose head is complete
        self._refused: Answer | None = None  # by its head
        self._drained = 0  # bytes thrown away
        self._head_bytes = 0  # of a head that is not complete yet
        self._in_body = False
        self._closing = False
        self._untaken = False
        """Whether the caller does not take his answers: until he does, no more of what he sends is looked at."""
        self._since = 0.0
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._server.connections.add(self)
        self._since = self._loop.time()
        self._idle = self._loop.call_later(IDLE_SECONDS, self._look_whether_idle)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._idle is not None:
            self._idle.cancel()
        if self.running is not None:
            self.running.cancel()

    def data_received(self, data: bytes) -> None:
        if self.running is None:
            if self._closing:
                self._drain(len(data))
            else:
                self._feed(data)
        else:
            self._received += data
            if len(self._received) > MOST_HEAD_BYTES + self._server.most_body_bytes:
                self.abort()

    def pause_writing(self) -> None:
        self._untaken = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._untaken = False
        self._transport.resume_reading()
        if self.running is None and not self._closing:
            self._next()

    def finish(self) -> None:
        """Close once the call that runs is answered."""
        self._closing = True
        if self.running is None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body = "", {}, bytearray()
        self._call = self._refused = None

    def on_url(self, url: bytes) -> None:
        self._target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._in_body, self._head_bytes = True, 0
        length, most = int(self._headers.get("content-length", "0")), self._server.most_body_bytes
        if not self._target.startswith("/"):
            self._refuse(400, f"this is no HTTP/1.1 request to a path: {self._target[:100]}")
        elif "transfer-encoding" in self._headers:
            self._refuse(411, "send the body with a Content-Length")
        elif length > most:
            self._refuse(413, f"the body has {length} bytes, more than the {most} allowed")
        elif self._refusal is None:
            self._call = Call(self._parser.get_method().decode("latin-1"), self._target, self._headers)
            self._refused = self._server.check(self._call)

    def on_body(self, body: bytes) -> None:
        if self._call is not None and self._refused is None:
            self._body += body

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._call is not None:
            self._call.body = bytes(self._body)
            self._waiting.append((self._call, self._refused, self._parser.should_keep_alive()))

    def _feed(self, data: bytes | bytearray) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # which may be ignored, but nothing is parsed after it
            self._waiting = deque((call, refused, False) for call, refused, _ in self._waiting)
            self._refuse(400, "this server speaks HTTP/1.1 only")
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is no HTTP/1.1 request: {error}")
        if not self._in_body:
            self._head_bytes += len(data) if not self._waiting else 0
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(431, f"the head of the request is longer than {MOST_HEAD_BYTES} bytes")
        elif self._refused is not None:
            self._refusal = self._refusal or self._refused  # without waiting for the rest of its body
        elif self._refusal is None and self._headers.get("expect", "").lower() == "100-continue":
            del self._headers["expect"]  # said once
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._next()

    def _next(self) -> None:
        """Begin the next call, or refuse what is none."""
        if self._untaken:
            return
        if self._waiting:
            self._head_bytes = 0
            call, refused, keep_alive = self._waiting.popleft()
            self.running = self._loop.create_task(self._answer(call, refused, keep_alive=keep_alive))
        elif self._refusal is not None:
            self._closing = True
            self._transport.write(self._refusal.encode(keep_alive=False))
            if self._transport.can_write_eof():
                self._transport.write_eof()
            if self._idle is not None:
                self._idle.cancel()
            self._idle = self._loop.call_later(DRAIN_SECONDS, self._transport.close)
        elif self._received:
            received, self._received = self._received, bytearray()
            self._feed(received)

    def _drain(self, count: int) -> None:
        """Throw `count` bytes away that came after the last answer."""
        self._drained += count
        if self._drained > DRAIN_BYTES:
            self._transport.close()

    async def _answer(self, call: Call, refused: Answer | None, *, keep_alive: bool) -> None:
        answer = refused if refused is not None else await self._server.handle(call)
        self.running = None
        self._since = self._loop.time()
        keep_alive = keep_alive and not self._closing
        self._transport.write(answer.encode(keep_alive=keep_alive))
        if keep_alive:
            self._next()
        else:
            self._closing = True
            self._transport.close()

    def _refuse(self, status: int, message: str) -> None:
        if self._refusal is None:
            self._refusal = self._server.refuse(status, message)

    def _look_whether_idle(self) -> None:
        left = self._since + IDLE_SECONDS - self._loop.time()
        if self.running is None and left <= 0:
            self.abort()  # closed, it would stay until its last answers are taken
        else:
            self._idle = self._loop.call_later(left if left > 0 else IDLE_SECONDS, self._look_whether_idle)
