"""Typed JSON over HTTP: one call, one Struct in, one Struct out, one deadline."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import aiohttp
import msgspec

from streamrl.errors import DeadlineExceeded, PeerError, PeerLost, WireError

Reply = TypeVar("Reply")

_encoder = msgspec.json.Encoder()


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
    data = _encoder.encode(body) if body is not None else None
    headers = {"Content-Type": "application/json"} if data is not None else None
    try:
        async with asyncio.timeout(timeout):
            async with session.request(method, url, data=data, headers=headers) as response:
                content = await response.read()
                status = response.status
    except TimeoutError as error:
        raise DeadlineExceeded(f"{peer} did not answer {method} {url} within {timeout:g} s") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise PeerLost(f"{peer} cannot be reached at {url}: {error or type(error).__name__}") from error
    if status >= 400:
        refusal = PeerError(f"{peer} answered {status} to {method} {url}: {_error_text(content)}")
        refusal.status = status
        raise refusal
    if not content and if_empty is not None:
        return if_empty
    try:
        return msgspec.json.decode(content, type=reply)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(
            f"{peer} answered {method} {url} with something else than a {reply.__name__}: "
            f"{error}; it said {content[:200]!r}"
        ) from error


def _error_text(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=ErrorReply).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return content[:500].decode(errors="replace")
