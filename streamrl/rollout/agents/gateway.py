"""The model server that agents ask: the APIs of OpenAI and Anthropic, answered by the policy in training.

An episode is known by its random key (`Authorization: Bearer` or `x-api-key`) and, where the URL names one, by its id.

Retries. A request is answered with an earlier request's generation, also while that is still running, if
- its `Idempotency-Key` has been seen in this episode,
- its `x-stainless-retry-count` is above 0 and its path and body are those of an earlier one, or
- its path and body are those of a request whose answer could not be delivered, because the client hung up.
Any other identical body is a new sample: best of n by repeated calls is legitimate. A client that hangs up cancels
nothing; the episode is told which answers were delivered.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from streamrl.rollout.agents.messages import ChatRequest, Completion, RequestRefused
from streamrl.rollout.agents.protocols import anthropic, chat, completions, inference
from streamrl.rollout.agents.protocols.common import Call

logger = logging.getLogger(__name__)

BODY_LIMIT = 8 << 20
CONCURRENT_REQUESTS = 64
"""Of one episode."""
CLOSE_SECONDS = 1.0

PROTOCOLS: dict[str, Any] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/messages": anthropic,
    "/inference/v1/generate": inference,
}


class EpisodeCalls(Protocol):
    """An episode, as far as its agent's calls go. An optional `delivered(completions)` hears what was written out."""

    async def complete(self, request: ChatRequest) -> Sequence[Completion]:
        """Return the answers to `request`; raises `RequestRefused`."""

    def score(self, value: float) -> None:
        """Take what the agent says that the episode is worth; raises `RequestRefused`."""


class Score(msgspec.Struct, frozen=True):
    """Body of `POST /{episode}/score`."""

    score: float


class Episodes(Protocol):
    """The episodes that may ask."""

    def find(self, key: str, episode: str) -> EpisodeCalls | None:
        """Return the episode with this key; `episode` is the id in the URL, or empty. An ended one may be raised as
        a `RequestRefused` with status 410."""


class _Generation:
    """One generation, and whether anybody has seen its answer."""

    def __init__(self, call: Call, task: asyncio.Task[Sequence[Completion]]) -> None:
        self.call = call
        self.task = task
        self.waiting = 0
        self.delivered = False


class _Asked:
    """What one episode has asked so far."""

    def __init__(self) -> None:
        self.by_key: dict[str, _Generation] = {}
        self.by_body: dict[bytes, _Generation] = {}
        self.responses: dict[str, tuple[Any, ...]] = {}
        self.running = 0


class Gateway:
    """Serve `episodes` over HTTP until `close`."""

    def __init__(
        self,
        episodes: Episodes,
        *,
        model: str,
        host: str = "127.0.0.1",
        port: int = 0,
        body_limit: int = BODY_LIMIT,
        concurrent_requests: int = CONCURRENT_REQUESTS,
    ) -> None:
        self.retries_answered = 0
        self._episodes = episodes
        self._model = model
        self._host = host
        self._port = port
        self._concurrent_requests = concurrent_requests
        self._asked: dict[str, _Asked] = {}
        self._warned: set[str] = set()
        self._tasks: set[asyncio.Task[Sequence[Completion]]] = set()
        app = web.Application(client_max_size=body_limit)
        for prefix in ("", "/{episode}"):
            app.router.add_get(prefix + "/v1/models", self._models)
            app.router.add_post(prefix + "/score", self._score)
            for path, protocol in PROTOCOLS.items():
                app.router.add_post(prefix + path, self._handler(path, protocol))
        self._runner = web.AppRunner(app, shutdown_timeout=CLOSE_SECONDS, access_log=None)

    async def start(self) -> str:
        """Start to listen, and return the URL, without an episode's id."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]
        return f"http://{self._host}:{self._port}"

    async def close(self) -> None:
        """Stop listening and cancel what still runs."""
        for task in self._tasks:
            task.cancel()
        await self._runner.cleanup()

    def forget(self, key: str) -> None:
        """Drop what is kept for the retries of the episode with this key, which has ended."""
        self._asked.pop(key, None)

    def _find(self, request: web.Request) -> tuple[str, EpisodeCalls]:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key", "") or (token.strip() if scheme.lower() == "bearer" else "")
        found = self._episodes.find(key, request.match_info.get("episode", "")) if key else None
        if found is None:
            raise RequestRefused("this key opens no such episode", status=401, kind="authentication_error")
        return key, found

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._find(request)
        except RequestRefused as refused:
            return _json(chat.error(refused.status, refused.kind, str(refused)), refused.status)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "streamrl"}
        return _json({"object": "list", "data": [model]})

    async def _score(self, request: web.Request) -> web.Response:
        try:
            _, episode = self._find(request)
            try:
                score = msgspec.json.decode(await request.read(), type=Score).score
            except msgspec.DecodeError as error:
                raise RequestRefused(f'the body must be {{"score": NUMBER}}: {error}') from None
            if not math.isfinite(score):
                raise RequestRefused(f"a score of {score} is not finite")
            episode.score(score)
        except RequestRefused as refused:
            return _json(chat.error(refused.status, refused.kind, str(refused)), refused.status)
        return _json({})

    def _handler(self, path: str, protocol: Any) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._answer(path, protocol, request)
            except RequestRefused as refused:
                return _json(protocol.error(refused.status, refused.kind, str(refused)), refused.status)
            except web.HTTPRequestEntityTooLarge as large:
                return _json(protocol.error(413, "request_too_large", str(large.text)), 413)
            except (ConnectionError, web.HTTPException):
                raise
            except Exception:
                logger.exception("a request of an agent to %s failed", path)
                return _json(protocol.error(500, "api_error", "the server failed; its log says why"), 500)

        return handle

    async def _answer(self, path: str, protocol: Any, request: web.Request) -> web.StreamResponse:
        key, episode = self._find(request)
        asked = self._asked.setdefault(key, _Asked())
        if asked.running >= self._concurrent_requests:
            message = f"{asked.running} requests of this episode are being answered; that is the limit"
            raise RequestRefused(message, status=429, kind="rate_limit_error")
        asked.running += 1
        try:
            raw = await request.read()
            generation = self._generation(path, protocol, request, raw, asked, episode)
            generation.waiting += 1
            try:
                found = await asyncio.shield(generation.task)
                answer = await _write(protocol, generation.call, found, request)
            finally:
                generation.waiting -= 1
        finally:
            asked.running -= 1
        if not generation.delivered:
            generation.delivered = True
            delivered = getattr(episode, "delivered", None)
            if delivered is not None:
                delivered(found)
        return answer

    def _generation(
        self, path: str, protocol: Any, request: web.Request, raw: bytes, asked: _Asked, episode: EpisodeCalls
    ) -> _Generation:
        name = request.headers.get("Idempotency-Key", "")
        digest = hashlib.sha256(path.encode() + b"\0" + raw).digest()
        earlier = asked.by_key.get(name) if name else None
        if earlier is None and (same := asked.by_body.get(digest)) is not None:
            retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            if retried or (same.waiting == 0 and not same.delivered):
                earlier = same
        if earlier is not None and not _failed(earlier.task):
            self.retries_answered += 1
            return earlier
        call: Call = protocol.parse(raw)
        if call.previous:
            if call.previous not in asked.responses:
                raise RequestRefused(f"previous_response_id: {call.previous!r} is not of this episode", status=404)
            messages = asked.responses[call.previous] + call.request.messages
            call = msgspec.structs.replace(call, request=msgspec.structs.replace(call.request, messages=messages))
        self._warn(call)
        task = asyncio.ensure_future(episode.complete(call.request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_retrieve)
        if path == "/v1/responses":
            task.add_done_callback(lambda done: _remember(asked, call, done))
        generation = _Generation(call, task)
        asked.by_body[digest] = generation
        if name:
            asked.by_key[name] = generation
        return generation

    def _warn(self, call: Call) -> None:
        for kind in call.overridden:
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning("agents ask for a %s of their own; the run's is used", kind)
        if call.model not in ("", self._model) and "model" not in self._warned:
            self._warned.add("model")
            logger.warning("agents ask for the model %.100r; the policy answers", call.model)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _remember(asked: _Asked, call: Call, task: asyncio.Task[Sequence[Completion]]) -> None:
    if not _failed(task):
        said = (task.result()[0].message,)
        instructions = call.instructions
        asked.responses[f"resp_{call.id}"] = call.request.messages[instructions:] + said


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def _write(protocol: Any, call: Call, found: Sequence[Completion], request: web.Request) -> web.StreamResponse:
    answer: web.StreamResponse
    if not call.stream:
        answer = _json(protocol.reply(call, found))
        await answer.prepare(request)
    else:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await answer.prepare(request)
        for event in protocol.events(call, found):
            await answer.write(event)
    await answer.write_eof()
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client hung up")
    return answer
