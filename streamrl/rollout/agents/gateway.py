"""The model server for agents: the APIs of OpenAI and Anthropic, served by the policy in training.

An episode is identified by its random key (`Authorization: Bearer` or `x-api-key`), and by its id if the URL contains
one. Clients use the token endpoint at the server's root; it takes the id from `X-Session-ID`.

Retries. A request receives the generation of an earlier request, even if that is still running, if
- its `Idempotency-Key` has been used in this episode,
- its `x-stainless-retry-count` is above 0 and its path and body equal those of an earlier request, unless that one
  was refused because too many others were in progress, or
- its path and body equal those of a request whose answer could not be delivered because the client hung up.
Any other identical body is a new sample: best of n by repeated calls is legitimate. Each generation is a task of its
own, and a client that hangs up cancels only its handler. The generation is cancelled as well if no client requests it
again within `ABANDONED_SECONDS`. An answer is delivered once all of it has left this process over an open connection;
the episode is notified of delivered answers. The last `KEPT_REQUESTS` requests of an episode can be repeated.

The server reads no body of a request without a valid key.

Streams. Pieces are sent as the policy generates them, from the beginning to each client of the same generation. A
stream begins with its first piece, so that an earlier refusal still has its own status.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from streamrl.config import SamplingConfig
from streamrl.errors import UNDECODABLE
from streamrl.rollout.agents.messages import ChatRequest, Completion, MessagePiece, RequestRefused
from streamrl.rollout.agents.policy import EpisodeRequest, Lease, Score
from streamrl.rollout.agents.protocols import anthropic, chat, common, completions, inference, responses
from streamrl.rollout.agents.protocols.common import Api, CheckedRequest
from streamrl.transport.addresses import LOOPBACK, Reach, url_of
from streamrl.transport.credentials import HEADER, admits
from streamrl.transport.http import Hosts
from streamrl.waits import CLOSE_SECONDS, cancel

logger = logging.getLogger(__name__)

BODY_LIMIT = 8 << 20
CONCURRENT_REQUESTS = 64
"""Most answers that are generated at the same time for one episode."""
KEPT_REQUESTS = 256
"""Latest requests of one episode that can be repeated, or continued by a `previous_response_id`."""
ABANDONED_SECONDS = 30.0
"""How long a generation continues after its clients have hung up; the SDKs retry within 8 seconds."""
GONE = 410
"""HTTP status: the episode has ended."""
_SCORE_FORM = 'the body must be {"score": NUMBER}, and may have "rewards" and "metrics", from names to numbers'
LEASE_SECONDS = 30.0
"""Longest wait of a request for an episode; the agent may then repeat the request."""

PROTOCOLS: dict[str, Api] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/messages": anthropic,
    "/v1/responses": responses,
    "/inference/v1/generate": inference,
}


OnPiece = Callable[[MessagePiece], None]


class EpisodeCalls(Protocol):
    """Calls of one episode's agent. An optional method `delivered(completions)` is notified of delivered answers."""

    def count(self, request: ChatRequest) -> None:
        """Count the answers that `request` asks for; raises `RequestRefused` if they exceed the episode's limit."""

    async def complete(
        self, request: ChatRequest, *, call: str, on_piece: OnPiece | None = None
    ) -> Sequence[Completion]:
        """Return the answers to `request`, which are sent under the id `call`; raises `RequestRefused`.

        `on_piece` receives their pieces as they are generated.
        """

    def score(self, said: Score) -> None:
        """Accept the score that the agent reports; raises `RequestRefused`."""


class Episodes(Protocol):
    """The episodes whose agents may send requests."""

    def find(self, key: str, episode: str) -> EpisodeCalls | None:
        """Return the episode with this key; `episode` is the id in the request, or empty. For an ended episode, an
        implementation may raise `RequestRefused` with status `GONE`."""

    def ended_with(self, key: str, score: Score) -> bool:
        """Return whether the episode with this key has ended with this score: the client repeats its report."""


class Leases(Protocol):
    """Episodes for agents that run elsewhere."""

    async def lease(self, seconds: float, request: EpisodeRequest) -> Lease | None:
        """Return an episode to play; None if none is available within `seconds`."""


class _Pieces:
    """The pieces of a generation so far, for streaming clients; ends with the generation."""

    def __init__(self) -> None:
        self._said: list[MessagePiece] = []
        self._ended = False
        self._more = asyncio.Event()

    def add(self, piece: MessagePiece) -> None:
        self._said.append(piece)
        self._wake()

    def end(self, _: object = None) -> None:
        """Mark the end: no further pieces follow."""
        self._ended = True
        self._wake()

    async def follow(self) -> AsyncIterator[list[MessagePiece]]:
        """Yield all pieces from the first one to the end, in lists of those that are available."""
        told = 0
        while True:
            more = self._more
            if told < len(self._said):
                pieces, told = self._said[told:], len(self._said)
                yield pieces
            elif self._ended:
                return
            else:
                await more.wait()

    def _wake(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()


class _Generation:
    """One generation, and whether its answer has been delivered."""

    def __init__(
        self, digest: bytes, call: CheckedRequest, task: asyncio.Task[Sequence[Completion]], pieces: _Pieces
    ) -> None:
        self.digest = digest
        """Fingerprint of path and body."""
        self.call = call
        """The checked request without its prompt. If a later call may continue its conversation, it keeps the messages
        after the instructions."""
        self.task = task
        self.pieces = pieces
        self.idempotency_keys: set[str] = set()
        self.waiting = 0
        """Number of clients that wait for the answer."""
        self.delivered = False

    @property
    def abandoned(self) -> bool:
        """Whether the answer was not delivered, and no client waits for it."""
        return not self.delivered and self.waiting == 0

    def cancel_if_abandoned(self) -> None:
        if self.abandoned:
            self.task.cancel()

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def succeeded(self) -> bool:
        return self.task.done() and not self.failed


class _RequestHistory:
    """The requests of one episode so far."""

    def __init__(self) -> None:
        self.kept: deque[_Generation] = deque(maxlen=KEPT_REQUESTS)
        """Generations, the latest last."""
        self.generating = 0
        self.refused: deque[bytes] = deque(maxlen=KEPT_REQUESTS)
        """Fingerprints of requests, not repeated yet, that were refused because too many others were in progress."""

    def done(self, task: asyncio.Task[Sequence[Completion]]) -> None:
        """Note the end of a generation."""
        self.generating -= 1
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs the error of an abandoned generation as never retrieved


@dataclass(eq=False)
class Gateway:
    """Serves `episodes` over HTTP until `close`."""

    episodes: Episodes
    _: KW_ONLY
    model: str
    sampling: SamplingConfig = SamplingConfig()  # noqa: RUF009 (frozen)
    """The run's, for all requests of agents."""
    vocab_size: int = 2**31
    """The model's; token ids are below it."""
    leases: Leases | None = None
    lease_key: str = ""
    reach: Reach = LOOPBACK
    port: int = 0
    hosts: InitVar[Hosts | None] = None
    """Recognises requests that a web page may have forged."""
    tls: ssl.SSLContext | None = None
    """The server's TLS context; None: plain text."""
    routes: InitVar[Sequence[web.RouteDef]] = ()
    """Further routes; like the lease of an episode, they require `lease_key`."""
    stored: Callable[[str], Awaitable[None]] | None = None
    """Awaited with an episode's key before its score is confirmed."""

    def __post_init__(self, hosts: Hosts | None, routes: Sequence[web.RouteDef]) -> None:
        self.retries_answered = 0
        self._asked: dict[str, dict[str, _RequestHistory]] = {}
        """By the episode's key and id."""
        self._warned: set[str] = set()
        self._tasks: set[asyncio.Task[Sequence[Completion]]] = set()
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_refuse, _check_page(hosts or Hosts())])
        for route in (web.post("/episodes", self._lease), *routes):
            app.router.add_route(route.method, route.path, self._with_key(route.handler))
        for prefix in ("", "/episodes/{episode}"):
            app.router.add_get(prefix + "/v1/models", self._models)
            app.router.add_post(prefix + "/score", self._score)
            for path, protocol in PROTOCOLS.items():
                app.router.add_post(prefix + path, partial(self._answer, path, protocol))
        self._runner = web.AppRunner(app, shutdown_timeout=CLOSE_SECONDS, access_log=None, handler_cancellation=True)

    async def start(self) -> str:
        """Start to listen, and return the server's URL, without an episode's id."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self.reach.local, self.port, ssl_context=self.tls).start()
        self.port = self._runner.addresses[0][1]
        return url_of(self.reach.announced, self.port, scheme="http" if self.tls is None else "https")

    async def close(self) -> None:
        """Stop listening and cancel running generations."""
        await cancel(*self._tasks)
        await self._runner.cleanup()
        await cancel(*self._tasks)

    def forget(self, key: str) -> None:
        """Drop the requests kept for retries of the episode with this key, which has ended."""
        self._asked.pop(key, None)

    def _find(self, request: web.Request) -> tuple[str, str, EpisodeCalls]:
        """Return the key, the id and the episode of the request; raises `RequestRefused` if key or id is wrong."""
        key = _key(request)
        name = request.match_info.get("episode", "")
        if not name and _protocol(request) is inference:
            name = request.headers.get("X-Session-ID", "")
        found = self.episodes.find(key, name) if key else None
        if found is None:
            raise RequestRefused("this key opens no such episode", status=401, kind="authentication_error")
        return key, name, found

    async def _models(self, request: web.Request) -> web.Response:
        self._find(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "streamrl"}
        return as_json({"object": "list", "data": [model]})

    async def _lease(self, request: web.Request) -> web.Response:
        if self.leases is None:
            raise RequestRefused("this run has agents of its own (rollout.agent.remote is false)", status=404)
        lease = await self.leases.lease(LEASE_SECONDS, await _episode_request(request))
        if lease is None:
            return web.Response(status=204)
        access = lease.access
        addresses = {name: getattr(access, name) for name in ("base_url", "anthropic_base_url", "score_url")}
        return as_json(
            {"id": access.id, "task": lease.task, "api_key": access.api_key, "model": access.model, **addresses}
        )

    def _with_key(self, handler: Any) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def checked(request: web.Request) -> web.StreamResponse:
            if not admits(self.lease_key, request.headers.get(HEADER)):
                message = (
                    f"{request.path} needs the header `{HEADER}: Bearer KEY` with the key of this server "
                    "(rollout.agent.api_key_env; for `streamrl gateway`, --token-env)"
                )
                raise RequestRefused(message, status=401, kind="authentication_error")
            found: web.StreamResponse = await handler(request)
            return found

        return checked

    async def _score(self, request: web.Request) -> web.Response:
        try:
            _, _, episode = self._find(request)
        except RequestRefused as refused:
            if refused.status != GONE or not self.episodes.ended_with(_key(request), await _said(request)):
                raise
            return as_json({})
        said = await _said(request)
        episode.score(said)
        if self.stored is not None:
            await self.stored(_key(request))
        return as_json({})

    async def _answer(self, path: str, protocol: Api, request: web.Request) -> web.StreamResponse:
        key, name, episode = self._find(request)
        asked = self._asked.setdefault(key, {}).setdefault(name, _RequestHistory())
        raw = await request.read()
        digest = hashlib.sha256(path.encode() + b"\0" + raw).digest()
        generation = _earlier(asked, request, digest)
        if generation is None:
            generation = self._begin(asked, protocol.parse(raw), digest, episode)
        else:
            self.retries_answered += 1
        if idempotency_key := request.headers.get("Idempotency-Key", ""):
            generation.idempotency_keys.add(idempotency_key)
        generation.waiting += 1
        try:
            if (events := generation.call.events) is None:
                answer = await _write(protocol, generation, request)
            else:
                answer = await _stream(events(generation.call), protocol, generation, request)
        finally:
            generation.waiting -= 1
            if generation.abandoned and not generation.task.done():
                asyncio.get_running_loop().call_later(ABANDONED_SECONDS, generation.cancel_if_abandoned)
        if generation.succeeded and not generation.delivered:
            generation.delivered = True
            delivered = getattr(episode, "delivered", None)
            if delivered is not None:
                delivered(generation.task.result())
        return answer

    def _begin(self, asked: _RequestHistory, call: CheckedRequest, digest: bytes, episode: EpisodeCalls) -> _Generation:
        """Start and keep the generation for `call`; raises `RequestRefused`."""
        if asked.generating >= CONCURRENT_REQUESTS:
            asked.refused.append(digest)
            message = f"{asked.generating} requests of this episode are in progress; that is the limit"
            raise RequestRefused(message, status=429, kind="rate_limit_error")
        _check_tokens(call.request, self.vocab_size)
        if call.previous:
            call = _continued(call, asked)
        episode.count(call.request)
        self._warn(call)
        asked.generating += 1
        pieces = _Pieces()
        streams = call.events is not None and not call.logprobs  # log-probabilities are sent with whole answers only
        answering = episode.complete(call.request, call=call.id, on_piece=pieces.add if streams else None)
        task = asyncio.ensure_future(answering)
        task.add_done_callback(pieces.end)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(asked.done)
        conversation = call.request.messages[call.instructions :] if call.remembered else ()
        bare = msgspec.structs.replace(call.request, messages=conversation, prompt=None)
        generation = _Generation(digest, msgspec.structs.replace(call, request=bare), task, pieces)
        asked.kept.append(generation)
        return generation

    def _warn(self, call: CheckedRequest) -> None:
        for name, wanted in call.sampling.items():
            own = getattr(self.sampling, name, None)
            if own is None:
                self._warn_once(name, "agents ask for %s = %.100r; it is left out", name, wanted)
            elif wanted != own:
                self._warn_once(name, "agents ask for a %s of %s; the run's %s is used", name, wanted, own)
        if call.top_logprobs:
            self._warn_once(
                "top_logprobs", "agents ask for top_logprobs; they get the log-probabilities of sampled tokens only"
            )
        if call.model not in ("", self.model):
            self._warn_once("model", "agents ask for the model %.100r; the policy answers", call.model)

    def _warn_once(self, subject: str, message: str, *values: object) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning(message, *values)


def _key(request: web.Request) -> str:
    """Return the key in `request`, in the header of either API."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return request.headers.get("x-api-key", "") or (token.strip() if scheme.lower() == "bearer" else "")


def _earlier(asked: _RequestHistory, request: web.Request, digest: bytes) -> _Generation | None:
    """Return the earlier generation that `request` repeats, or None; raises `RequestRefused`."""
    name = request.headers.get("Idempotency-Key", "")
    named = [generation for generation in asked.kept if name in generation.idempotency_keys]
    if any(generation.digest != digest for generation in named):
        message = f"Idempotency-Key: {name!r} has been used for a request with another path or body"
        raise RequestRefused(message, status=422, kind="idempotency_error")
    same = [generation for generation in asked.kept if generation.digest == digest and not generation.failed]
    retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    if retried and digest in asked.refused:
        asked.refused.remove(digest)
        retried = False  # the refused request had no generation
    candidates = [
        *(generation for generation in named if not generation.failed),
        *(generation for generation in same if generation.abandoned),
        *(same[-1:] if retried else ()),
    ]
    return candidates[0] if candidates else None


async def _episode_request(request: web.Request) -> EpisodeRequest:
    """Read the body of `request`, which may be empty; raises `RequestRefused`."""
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=EpisodeRequest)
    except UNDECODABLE as error:
        message = f'the body may be empty, or {{"task": {{...}}, "group": "NAME"}}: {error}'
        raise RequestRefused(message) from None


async def _said(request: web.Request) -> Score:
    """Read the score in the body of `request`; raises `RequestRefused`."""
    try:
        score = msgspec.json.decode(await request.read(), type=Score)
    except UNDECODABLE as error:
        raise RequestRefused(f"{_SCORE_FORM}: {error}") from None
    if not score.said:
        raise RequestRefused(_SCORE_FORM)
    return score


def _continued(call: CheckedRequest, asked: _RequestHistory) -> CheckedRequest:
    """Return `call` with the continued conversation inserted after its instructions; raises `RequestRefused`."""
    for earlier in asked.kept:
        if earlier.call.id == call.previous and earlier.call.remembered and earlier.succeeded:
            before = (*earlier.call.request.messages, earlier.task.result()[0].message)
            own = call.request.messages
            messages = own[: call.instructions] + before + own[call.instructions :]
            return msgspec.structs.replace(call, request=msgspec.structs.replace(call.request, messages=messages))
    message = f"previous_response_id: not among the answers to the last {KEPT_REQUESTS} requests of this episode"
    raise RequestRefused(message, status=404, kind="not_found_error")


def _check_tokens(request: ChatRequest, vocab_size: int) -> None:
    """Raise `RequestRefused` for tokens outside the vocabulary: if a gserver refuses them, the whole episode fails."""
    prompt = () if request.prompt is None or isinstance(request.prompt, str) else request.prompt
    for where, ids in (("the prompt", prompt), ("stop_token_ids", request.stop_token_ids)):
        if max(ids, default=0) >= vocab_size:
            place, token = next((place, token) for place, token in enumerate(ids) if token >= vocab_size)
            raise RequestRefused(
                f"token id {token}, at place {place} (from 0) of {where}, is outside the model's vocabulary of "
                f"{vocab_size} tokens"
            )


def _protocol(request: web.Request) -> Api:
    """Return the API of `request`, even if its path belongs to no API."""
    for path, protocol in PROTOCOLS.items():
        if request.path.endswith(path):
            return protocol
    return anthropic if "anthropic-version" in request.headers else chat


def _check_page(hosts: Hosts) -> Middleware:
    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if why := hosts.forged(request.headers.get("Host"), request.headers.get("Origin")):
            raise RequestRefused(why, status=403, kind="permission_error")
        return await handler(request)

    return check


@web.middleware
async def _refuse(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert errors of `handler` to replies in the format of the requested API."""

    def error(status: int, kind: str, message: str) -> web.Response:
        return as_json(_protocol(request).error(status, kind, message), status)

    try:
        return await handler(request)
    except RequestRefused as refused:
        return error(refused.status, refused.kind, str(refused))
    except web.HTTPRequestEntityTooLarge:
        return error(413, "request_too_large", f"the body is larger than {request.client_max_size} bytes")
    except web.RequestPayloadError:
        return error(400, "invalid_request_error", "the body does not have its Content-Encoding")
    except web.HTTPNotFound:
        return error(404, "not_found_error", f"there is no {request.method} {request.path}")
    except web.HTTPMethodNotAllowed as wrong:
        allowed = ", ".join(sorted(wrong.allowed_methods))
        answer = error(405, "invalid_request_error", f"{request.path} takes {allowed}, not {request.method}")
        answer.headers["Allow"] = allowed
        return answer
    except (ConnectionError, web.HTTPException):
        raise
    except Exception:  # tolerance point: one faulty request must not end the others
        logger.exception("a request of an agent to %s failed", request.path)
        return error(500, "api_error", "the server failed; its log has the reason")


def as_json(body: Any, status: int = 200) -> web.Response:
    """Return a response with `body` as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def _write(protocol: Api, generation: _Generation, request: web.Request) -> web.StreamResponse:
    """Send the whole answer; raises `ConnectionError` if the client hangs up before all of it has left."""
    found = await asyncio.shield(generation.task)
    answer = as_json(protocol.reply(generation.call, found))
    _send_at_once(request)
    await answer.prepare(request)
    await answer.write_eof()
    _check_connected(request)
    return answer


async def _stream(
    events: common.EventStream, protocol: Api, generation: _Generation, request: web.Request
) -> web.StreamResponse:
    """Send the answer as it is generated. Raises as `_write` does, and an error of the generation before its first
    piece.

    A later error becomes the last event.
    """
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    _send_at_once(request)
    async for pieces in generation.pieces.follow():
        if not answer.prepared:
            await answer.prepare(request)
        await answer.write(b"".join(map(events.piece, pieces)))
        _check_connected(request)
    try:
        last = events.end(await asyncio.shield(generation.task))
    except RequestRefused as refused:
        if not answer.prepared:
            raise
        last = common.event(protocol.error(refused.status, refused.kind, str(refused)), "error")
    if not answer.prepared:
        await answer.prepare(request)
    await answer.write(last)
    await answer.write_eof()
    _check_connected(request)
    return answer


def _send_at_once(request: web.Request) -> None:
    """Make each write wait until the buffer is empty, so that written data has left this process."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)


def _check_connected(request: web.Request) -> None:
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client hung up")
