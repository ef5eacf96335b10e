"""Typed JSON over HTTP: one call, one Struct in, one Struct out, one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from streamrl.errors import UNDECODABLE, DeadlineExceeded, PeerError, PeerLost, WireError

Reply = TypeVar("Reply")

_encoder = msgspec.json.Encoder()
_END_OF_EVENT = b"\n\n"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str


class ErrorReply(msgspec.Struct, frozen=True):
    """Body of every answer with a status of 400 or above."""

    error: ErrorDetail


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
) -> Reply:
    """Send `body` as JSON and decode the answer as `reply`; an empty answer stands for `if_empty`, if that is given.

    `peer` names the other side in errors. Raises `PeerError` for an answer of 400 or above,
    `PeerLost` when the peer cannot be reached, `DeadlineExceeded` after `timeout` seconds,
    `WireError` when the answer is not a `reply`.
    """
    async with _answered(session, method, url, body, timeout=timeout, peer=peer) as response:
        content = await response.read()
    if not content and if_empty is not None:
        return if_empty
    try:
        return msgspec.json.decode(content, type=reply)
    except UNDECODABLE as error:
        raise WireError(
            f"{peer} answered {method} {url} with something else than a {reply.__name__}: "
            f"{error}; it said {content[:200]!r}"
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

    Raises as `call` does, and `PeerLost` when the answer breaks off before its `[DONE]`.
    """
    async with _answered(session, "POST", url, body, timeout=timeout, peer=peer) as response:
        rest = b""
        async for content in response.content.iter_any():
            *events, rest = (rest + content).split(_END_OF_EVENT)
            for event in events:
                data = event.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                on_event(data)
    raise PeerLost(f"{peer} broke its answer to POST {url} off")


@asynccontextmanager
async def _answered(
    session: aiohttp.ClientSession, method: str, url: str, body: msgspec.Struct | None, *, timeout: float, peer: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer, if it is none of 400 or above; `timeout` covers what is done with it, too."""
    data = _encoder.encode(body) if body is not None else None
    headers = {"Content-Type": "application/json"} if data is not None else None
    try:
        async with asyncio.timeout(timeout), session.request(method, url, data=data, headers=headers) as response:
            if response.status >= 400:
                text = _error_text(await response.read())
                refusal = PeerError(f"{peer} answered {response.status} to {method} {url}: {text}")
                refusal.status = response.status
                raise refusal
            yield response
    except TimeoutError as error:
        raise DeadlineExceeded(f"{peer} did not answer {method} {url} within {timeout:g} s") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise PeerLost(f"{peer} cannot be reached at {url}: {error or type(error).__name__}") from error


def _error_text(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=ErrorReply).error.message
    except UNDECODABLE:
        return content[:500].decode(errors="replace")
