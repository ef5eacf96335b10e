"""Typed JSON over HTTP: one call, one Struct in, one Struct out, one deadline; and the server for such calls.

Both use aiohttp. The server is aiohttp's low-level one, without a router or middlewares, for thousands of short calls
each second. Invariants: a caller that disconnects cancels its call; no body is read into memory beyond the limit, and
none if the head of the request is rejected; a connection gets no further replies until its caller has read the sent
ones, and is closed if the caller does not read them; after `close` no call runs.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from streamrl.errors import UNDECODABLE, DeadlineExceeded, NotOfRun, PeerError, PeerLost, WireError

# --- calls ---

Reply = TypeVar("Reply")

_encoder = msgspec.json.Encoder()
_END_OF_EVENT = b"\n\n"
_DATES = (9, 10)
"""OpenSSL's error codes for a certificate that is not valid yet, or no longer (`X509_V_ERR_CERT_NOT_YET_VALID`,
`X509_V_ERR_CERT_HAS_EXPIRED`)."""


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """Description of the error."""

    message: str
    retry_seconds: float = 0.0
    """As in `PeerError`."""


class ErrorReply(msgspec.Struct, frozen=True):
    """Body of every reply with a status of 400 or above."""

    error: ErrorDetail


def new_session(
    tls: ssl.SSLContext | None,
    *,
    headers: Mapping[str, str] | None = None,
    connect_seconds: float | None = None,
    unix: Path | None = None,
) -> aiohttp.ClientSession:
    """Return a session with any number of connections.

    `tls`: verifies encrypted servers. `connect_seconds`: limit on the time to connect. A session has no other limit: a
    task that is cancelled in the moment when aiohttp's own limit expires is not cancelled. `unix`: the Unix socket of
    the only server that is called.
    """
    verified = aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else True) if unix is None else None
    return aiohttp.ClientSession(
        connector=verified or aiohttp.UnixConnector(str(unix), limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds),
        headers=headers,
    )


def method_of(body: msgspec.Struct | None) -> str:
    """Return the HTTP method of a call with this body."""
    return "GET" if body is None else "POST"


async def call(
    session: aiohttp.ClientSession,
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
    """Post `body` as JSON, or get `url` without a body, and decode the response as `reply`; return `if_empty`, if
    given, for an empty response.

    `headers` are added to the session's own. `peer` names the other side in errors; no error quotes a `confidential`
    response. Raises `PeerError` for a status of 400 or above, `PeerLost` if the peer cannot be reached (`NotOfRun` if
    it does not belong to the run), `DeadlineExceeded` after `timeout` seconds, `WireError` if the response is not a
    `reply`.
    """
    async with _answered(session, url, body, timeout=timeout, peer=peer, headers=headers) as response:
        content = await response.read()
    if not content and if_empty is not None:
        return if_empty
    try:
        return msgspec.json.decode(content, type=reply)
    except UNDECODABLE as error:
        said = "" if confidential else f"; its reply: {content[:200]!r}"
        raise WireError(
            f"{peer} answered {method_of(body)} {url} with something else than a {reply.__name__}: {error}{said}"
        ) from error


async def send(session: aiohttp.ClientSession, url: str, body: msgspec.Struct, *, timeout: float, peer: str) -> None:
    """Post `body` as JSON, and ignore the content of the response. Raises as `call` does."""
    async with _answered(session, url, body, timeout=timeout, peer=peer, headers=None) as response:
        await response.read()


async def follow(
    session: aiohttp.ClientSession,
    url: str,
    body: msgspec.Struct,
    on_event: Callable[[bytes], None],
    *,
    timeout: float,
    peer: str,
) -> None:
    """Post `body` as JSON, and pass the data of each server-sent event of the response to `on_event` as it arrives.

    Raises as `call` does (`WireError` for a response that is not an event stream), and `PeerLost` if the response ends
    before its `[DONE]`.
    """
    async with _answered(session, url, body, timeout=timeout, peer=peer) as response:
        if response.content_type != "text/event-stream":
            said = (await response.content.read(200))[:200]
            raise WireError(f"{peer} answered POST {url} with something else than events; its reply: {said!r}")
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
    url: str,
    body: msgspec.Struct | None,
    *,
    timeout: float,
    peer: str,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response, if its status is below 400; `timeout` includes the time in which the caller reads it."""
    method = method_of(body)
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
            f"{peer} cannot be reached at {url}: no reply; is that machine up, and does a firewall drop "
            f"packets to port {urlsplit(url).port}?"
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
    """Return why a certificate is rejected, and the remedy."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _DATES:
        now = datetime.datetime.now(datetime.UTC)
        return f"{error.verify_message}, by this machine's clock, which is at {now:%Y-%m-%d %H:%M} UTC; set it"
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

IDLE_SECONDS = 120.0
"""A connection is closed after this time without a request, with an incomplete body, or with replies that the caller
does not read."""
LINGER_SECONDS = 1.0
"""The rest of a rejected body is read and discarded for this long before the connection is closed. Closing it at once
could lose the reply with the reason."""
BACKLOG = 4096
"""Maximum number of connections that wait to be accepted: all processes of a run may connect at once."""


class Hosts:
    """Detects requests that a web page may have forged. A browser sends the page's origin in `Origin`, and the page's
    name for this server in `Host`. In a DNS rebinding attack that is the attacker's name, resolved to this machine.
    Programs send no `Origin`."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """`names`: allowed names of the server, in addition to addresses, `localhost` and the machine's own name."""
        self._names = {name.lower() for name in (*names, "localhost", socket.gethostname())}
        self._good: set[str] = set()

    def forged(self, host: str | None, origin: str | None) -> str:
        """Return why a request with these headers is rejected; empty if it is accepted."""
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


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpServer:
    """Passes each request to `handle` once its head has arrived, one at a time per connection.

    `handle` reads the body with `read_body`, and is cancelled if the caller disconnects.
    """

    def __init__(self, handle: Handler, *, most_body_bytes: int) -> None:
        self._server = web.Server(
            handle,
            request_factory=partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=most_body_bytes),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
        )
        self._listening: asyncio.Server | None = None

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Start listening; return the host and port, of IPv4 if `host` has an address of both kinds (ZMQ uses IPv4).

        `tls`: the server's certificate; None: connections are not encrypted. Raises `OSError`.
        """
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._server, host, port, backlog=BACKLOG, ssl=tls)
        for listening in self._listening.sockets:  # connections inherit it
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * IDLE_SECONDS))
        address = min((own.getsockname() for own in self._listening.sockets), key=lambda place: ":" in place[0])
        return address[0], address[1]

    async def close(self, *, patience: float) -> None:
        """Stop listening. Running calls have `patience` seconds to end, and are then cancelled."""
        if self._listening is not None:
            self._listening.close()
        self._server.pre_shutdown()
        await self._server.shutdown(patience / 2)  # `shutdown` waits twice
        await asyncio.sleep(0)


async def read_body(request: web.BaseRequest) -> bytes:
    """Return the body of a request; raises `PeerError` for one that is too large, broken or too slow."""
    most = request.client_max_size
    try:
        if request.content.is_eof():  # it came with the head, as usual: a deadline would cost more than the read
            return await request.read()
        if (request.content_length or 0) > most:
            raise PeerError(f"the body has {request.content_length} bytes, more than the {most} allowed", status=413)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        async with asyncio.timeout(IDLE_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise PeerError(f"the body has more than the {most} bytes allowed", status=413) from error
    except web.RequestPayloadError as error:
        raise PeerError(f"the body is not what its head announces: {error}", status=400) from error
    except TimeoutError as error:
        raise PeerError(f"the body has not come to its end within {IDLE_SECONDS:g} s", status=408) from error


def _is_fault_of_server(record: logging.LogRecord) -> bool:
    """Whether a line of aiohttp's log is about more than malformed HTTP. Malformed requests get status 400, and their
    tracebacks could fill the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


logging.getLogger("aiohttp.server").addFilter(_is_fault_of_server)
