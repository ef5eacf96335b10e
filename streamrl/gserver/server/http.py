"""The HTTP server of a gserver: SGLang's native API in front of an `Engine`.

| status | when |
|---|---|
| 400 | the request is wrong, or refused in the present state; the message has the reason and the remedy |
| 401, 403 | the caller presents no key, or an insufficient one, or is a web page |
| 404, 405 | there is no such call |
| 500 | the engine failed on this request, or a weight update failed; the server lives on |
| 503 | the queue is full |

A client that disconnects aborts its request. Every possible mistake in the body of /generate is detected here, before
the engine receives it, and reported together with the remedy.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Middleware

from streamrl.errors import UNDECODABLE, ModelError, Refused, StreamRLError
from streamrl.gserver.server.engine import Engine, Job, Output, QueueFull, Text, Ticket
from streamrl.records.logs import RateLimitedLog
from streamrl.stop_strings import without_begun
from streamrl.transport.credentials import HEADER, GserverKeys, admits
from streamrl.transport.generation import (
    GENERATION_CALLS,
    AbortRequest,
    DestroyWeightsUpdateGroup,
    Empty,
    GenerateReply,
    GenerateRequest,
    InitWeightsUpdateGroup,
    MetaInfo,
    ModelInfo,
    Outcome,
    PauseGeneration,
    SamplingParams,
    StagedSums,
    StreamPart,
    TokenLogprob,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightVersion,
    WeightsChecker,
    encoded_routes,
)
from streamrl.transport.http import ErrorDetail, ErrorReply, Hosts
from streamrl.waits import cancel

# --- /generate: from its body to jobs, and from outputs to its reply ---

MAX_RESPONSES = 4096
"""Most responses of one request: number of prompts times `n`."""
MAX_TOP_LOGPROBS = 1024
HARMLESS_KEYS = frozenset(("log_metrics", "priority", "modalities", "background", "conversation_id"))
NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "spaces_between_special_tokens": True,
}
"""Sampling parameters of SGLang that are not supported, with their neutral values."""

_REQUEST_KEYS = frozenset(field.encode_name for field in msgspec.structs.fields(GenerateRequest))
_SAMPLING_KEYS = frozenset(field.encode_name for field in msgspec.structs.fields(SamplingParams))


class EngineLimits(msgspec.Struct, frozen=True):
    """The limits of an engine, in tokens."""

    vocab_size: int
    max_context: int


class GenerationRequest(msgspec.Struct, frozen=True):
    """A checked request."""

    rids: dict[str, list[str]]
    """Name that a client may abort → names of its jobs: the whole request, each prompt, and each response."""
    jobs: list[Job]
    single: bool
    """Whether the reply is one object, not a list."""
    return_logprob: bool
    stream: bool


def parse(body: bytes, *, limits: EngineLimits, text: Text) -> GenerationRequest:
    """Check the body of /generate; raises `Refused`."""
    try:
        tree = msgspec.json.decode(body)
        _refuse_unknown(tree)
        request = msgspec.convert(tree, GenerateRequest)
    except UNDECODABLE as error:
        raise Refused(f"the body is not a generate request: {error}") from error
    return checked(request, limits=limits, text=text)


def checked(request: GenerateRequest, *, limits: EngineLimits, text: Text) -> GenerationRequest:
    """Return the jobs of `request`; raises `Refused`."""
    if request.lora_path is not None:
        raise Refused("lora_path: a request here has the adapter that is served when it begins, and cannot name one")
    prompts, single = _prompts(request, text)
    params = _params(request, len(prompts))
    responses = sum(p.n for p in params)
    if responses > MAX_RESPONSES:
        raise Refused(f"one request may ask for {MAX_RESPONSES} responses, not {responses}; send several requests")
    names = _names(request, len(prompts))
    rids: dict[str, list[str]] = {name: [] for name in names}
    named = len(rids) == len(prompts)
    jobs: list[Job] = []
    for known_as, prompt, sampling in zip(names, prompts, params, strict=True):
        _check_prompt(prompt, limits)
        _check_params(sampling, limits)
        _check_length(prompt, sampling, limits)
        for sibling in range(sampling.n):
            name = known_as if named and sampling.n == 1 else f"{known_as}-{len(rids[known_as])}"
            if name != known_as and name in rids:
                raise Refused(f"rid {name} is what a response to {known_as} is called; give that prompt another")
            rids[known_as].append(name)
            jobs.append(_job(request, name, prompt, _sibling_params(sampling, sibling)))
    rids |= {job.rid: [job.rid] for job in jobs}
    _check_logprobs(request)
    return GenerationRequest(
        rids=rids,
        jobs=jobs,
        single=single and responses == 1,
        return_logprob=request.return_logprob,
        stream=request.stream,
    )


def _names(request: GenerateRequest, prompts: int) -> list[str]:
    """Return the name of each prompt: its own, or one name for all prompts."""
    if not isinstance(request.rid, list):
        return [request.rid or uuid.uuid4().hex] * prompts
    if len(request.rid) != prompts or len(set(request.rid)) != prompts:
        raise Refused(f"rid must be one string, or {prompts} different ones, one for each prompt")
    return request.rid


def reply(output: Output, job: Job, *, text: Text, return_logprob: bool, began: float) -> GenerateReply:
    """Return the reply for one response, finished or not; `began` is its arrival on the monotonic clock."""
    wants_prompt = return_logprob and job.logprob_start_len >= 0
    wants_top = return_logprob and job.top_logprobs_num > 0
    return GenerateReply(
        text=visible_text(output, job, text),
        output_ids=output.output_ids,
        meta_info=MetaInfo(
            id=job.rid,
            finish_reason=output.finish_reason,
            prompt_tokens=len(job.input_ids),
            completion_tokens=len(output.output_ids),
            cached_tokens=output.cached_tokens,
            weight_version=output.weight_version,
            weight_versions=output.spans if output.finish_reason is not None else None,
            num_retractions=output.num_retractions,
            e2e_latency=time.monotonic() - began,
            input_token_logprobs=_with_ids(output.input_logprobs, _scored(output, job)) if wants_prompt else None,
            output_token_logprobs=_with_ids(output.logprobs, output.output_ids) if return_logprob else None,
            input_top_logprobs=[_pairs(pairs) for pairs in output.input_top_logprobs]
            if wants_top and wants_prompt
            else None,
            output_top_logprobs=[_pairs(pairs) for pairs in output.top_logprobs] if wants_top else None,
            routed_experts=None if output.routed_experts is None else encoded_routes(output.routed_experts),
        ),
    )


def _scored(output: Output, job: Job) -> list[int]:
    """Return the prompt's tokens that have log-probabilities; empty if the request was aborted before it ran."""
    return job.input_ids[job.logprob_start_len :][: len(output.input_logprobs)]


def visible_text(output: Output, job: Job, text: Text) -> str:
    """Return the response's text without its stop string or token; while it grows, without text that may change."""
    reason = output.finish_reason
    tokens = output.output_ids
    if reason is not None and isinstance(reason.matched, int):
        tokens = tokens[:-1]
    decoded = text.decode(tokens, skip_special_tokens=job.params.skip_special_tokens)
    if reason is not None:
        if isinstance(reason.matched, str) and reason.matched in decoded:
            decoded = decoded[: decoded.index(reason.matched)]
        return decoded
    return without_begun(decoded.rstrip("\ufffd"), *job.stop)  # removes the first bytes of an incomplete character


def _refuse_unknown(tree: Any) -> None:
    """Raise `Refused` for keys that are unknown here and would change the reply in SGLang."""
    if not isinstance(tree, dict):
        raise Refused("the body must be a JSON object")
    _refuse_keys(tree, _REQUEST_KEYS | HARMLESS_KEYS, where="the request")
    sampling = tree.get("sampling_params", {})
    for params in sampling if isinstance(sampling, list) else [sampling]:
        if isinstance(params, dict):
            others = {key: value for key, value in params.items() if NEUTRAL.get(key, ...) != value}
            _refuse_keys(others, _SAMPLING_KEYS, where="sampling_params")


def _refuse_keys(tree: dict[str, Any], known: Collection[str], *, where: str) -> None:
    unknown = sorted(key for key, value in tree.items() if key not in known and value not in (None, False, "", [], {}))
    if unknown:
        raise Refused(
            f"{where} asks for {', '.join(unknown)}, which this gserver does not support; "
            f"supported: {', '.join(sorted(known))}"
        )


def _prompts(request: GenerateRequest, text: Text) -> tuple[list[list[int]], bool]:
    """Return the token ids of every prompt, and whether the request has one prompt that is not in a list."""
    if (request.text is None) == (request.input_ids is None):
        raise Refused("give either text or input_ids")
    if request.text is not None:
        single = isinstance(request.text, str)
        texts = [request.text] if isinstance(request.text, str) else request.text
        prompts = [text.encode(t) for t in texts]
    else:
        ids: Any = request.input_ids
        if len(set(map(type, ids))) > 1:
            raise Refused("input_ids must be token ids or lists of them, not both")
        single = not ids or isinstance(ids[0], int)
        prompts = [ids] if single else ids
    if not prompts:
        raise Refused("the list of prompts is empty; give at least one")
    return prompts, single


def _params(request: GenerateRequest, prompts: int) -> list[SamplingParams]:
    if isinstance(request.sampling_params, SamplingParams):
        return [request.sampling_params] * prompts
    if len(request.sampling_params) != prompts:
        raise Refused(
            f"{len(request.sampling_params)} sampling_params for {prompts} prompts; give one for each, or one"
        )
    return request.sampling_params


def _sibling_params(params: SamplingParams, sibling: int) -> SamplingParams:
    """Return the parameters of one sibling. Each gets its own seed, since equal seeds would give equal responses."""
    if params.sampling_seed is None or sibling == 0:
        return params
    return msgspec.structs.replace(params, sampling_seed=params.sampling_seed + sibling)


def _job(request: GenerateRequest, rid: str, prompt: list[int], params: SamplingParams) -> Job:
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    return Job(
        rid=rid,
        input_ids=prompt,
        params=params,
        stop=stop,
        logprob_start_len=request.logprob_start_len if request.return_logprob else -1,
        top_logprobs_num=request.top_logprobs_num if request.return_logprob else 0,
        return_routed_experts=request.return_routed_experts,
        stream=request.stream and (params.stream_interval or 1) < params.max_new_tokens,
        stream_interval=params.stream_interval or 1,
    )


def _check_prompt(prompt: list[int], limits: EngineLimits) -> None:
    if not prompt:
        raise Refused("the prompt is empty; give at least one token")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < limits.vocab_size:
            raise Refused(f"token id {token} is outside the vocabulary of {limits.vocab_size} tokens")


def _check_params(params: SamplingParams, limits: EngineLimits) -> None:
    problems = []
    if params.temperature < 0:
        problems.append(f"temperature must be at least 0, not {params.temperature}")
    if not 0 < params.top_p <= 1:
        problems.append(f"top_p must be above 0 and at most 1, not {params.top_p}")
    if params.top_k < -1 or params.top_k == 0:
        problems.append(f"top_k must be at least 1, or -1 for no limit, not {params.top_k}")
    if not 0 <= params.min_p <= 1:
        problems.append(f"min_p must be from 0 to 1, not {params.min_p}")
    if params.max_new_tokens < 0:
        problems.append(f"max_new_tokens must be at least 0, not {params.max_new_tokens}")
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        problems.append(
            f"min_new_tokens must be from 0 to max_new_tokens ({params.max_new_tokens}), not {params.min_new_tokens}"
        )
    if params.n < 1:
        problems.append(f"n must be at least 1, not {params.n}")
    if "" in ([params.stop] if isinstance(params.stop, str) else params.stop or ()):
        problems.append("stop must not contain an empty string")
    outside = [token for token in params.stop_token_ids or () if not 0 <= token < limits.vocab_size]
    if outside:
        problems.append(f"stop_token_ids {outside} are outside the vocabulary of {limits.vocab_size} tokens")
    if problems:
        raise Refused("sampling_params: " + "; ".join(problems))


def _check_length(prompt: list[int], params: SamplingParams, limits: EngineLimits) -> None:
    if len(prompt) + params.max_new_tokens > limits.max_context:
        raise Refused(
            f"a prompt of {len(prompt)} tokens and max_new_tokens = {params.max_new_tokens} exceed the context of "
            f"{limits.max_context} tokens; shorten one of them, or raise gserver.max_context if the model allows it"
        )


def _check_logprobs(request: GenerateRequest) -> None:
    if request.logprob_start_len < -1:
        raise Refused(f"logprob_start_len must be at least -1 (none), not {request.logprob_start_len}")
    if not 0 <= request.top_logprobs_num <= MAX_TOP_LOGPROBS:
        raise Refused(f"top_logprobs_num must be from 0 to {MAX_TOP_LOGPROBS}, not {request.top_logprobs_num}")


def _with_ids(logprobs: list[Any], ids: list[int]) -> list[TokenLogprob]:
    return [(logprob, token, None) for logprob, token in zip(logprobs, ids, strict=True)]


def _pairs(pairs: list[tuple[float, int]] | None) -> list[TokenLogprob] | None:
    return None if pairs is None else [(logprob, token, None) for logprob, token in pairs]


# --- the server ---

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 256 * 2**20
"""Large enough for a batch of long prompts, or the names of all tensors of a model."""
HEALTH_SECONDS = 20.0
"""Longest time that /health_generate waits for its token."""

_encode = msgspec.json.Encoder().encode


class Server:
    """Owns the live requests of one engine."""

    def __init__(self, engine: Engine, *, text: Text) -> None:
        self._engine = engine
        self._text = text
        self._limits = EngineLimits(vocab_size=engine.vocab_size, max_context=engine.max_context)
        self._live: dict[str, list[str]] = {}  # `GenerationRequest.rids` of all unfinished requests
        self._aborting: set[asyncio.Task[None]] = set()

    def application(self, *, keys: GserverKeys, hosts: Hosts) -> web.Application:
        """Return the application with all calls.

        It must run with `handler_cancellation=True`, or requests of lost clients continue. `keys`: the keys that
        callers must present, except for /health; `hosts` recognizes requests that a web page may have forged.
        """
        checks = [_answer_errors, _check_caller(keys, hosts)]
        app = web.Application(middlewares=checks, client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/health", self._health),
                web.get("/health_generate", self._health_generate),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                _post("/pause_generation", PauseGeneration, self._pause),
                _post("/continue_generation", Empty, self._continue),
                _post("/abort_request", AbortRequest, self._abort),
                _post("/init_weights_update_group", InitWeightsUpdateGroup, self._join_group),
                _post("/destroy_weights_update_group", DestroyWeightsUpdateGroup, self._leave_group),
                _post("/begin_weight_update", Empty, self._begin_update),
                _post("/update_weights_from_distributed", UpdateWeightsFromDistributed, self._receive),
                _post("/end_weight_update", Empty, self._end_update),
                _post("/update_weights_from_disk", UpdateWeightsFromDisk, self._load),
                _post("/update_weight_version", UpdateWeightVersion, self._set_version),
                _post("/weights_checker", WeightsChecker, self._checksum),
            ]
        )
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        began = time.monotonic()
        generation = parse(await request.read(), limits=self._limits, text=self._text)
        if unfinished := generation.rids.keys() & self._live.keys():
            raise Refused(f"a request with rid {min(unfinished)} is not finished yet; give every request its own")
        self._live |= generation.rids
        tickets: list[Ticket] = []
        try:
            for job in generation.jobs:
                tickets.append(self._engine.submit(job))
            if generation.stream:
                return await self._stream(request, generation, tickets, began)
            replies = [self._reply(generation, t.job, await t.result(), began) for t in tickets]
            return _json(replies[0] if generation.single else replies)
        finally:
            for rid in generation.rids:
                del self._live[rid]
            self._abandon(tickets)

    async def _stream(
        self, request: web.Request, generation: GenerationRequest, tickets: list[Ticket], began: float
    ) -> web.StreamResponse:
        """Send server-sent events, each with all content so far, then `[DONE]`."""
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        try:
            async for updates in _merged(tickets):
                parts = (self._part(generation, index, tickets[index].job, output, began) for index, output in updates)
                await response.write(b"".join(map(_event, parts)))
        except StreamRLError as error:  # the status line is already sent, so the error becomes an event
            await response.write(_event(_error(error)))
        await response.write_eof(DONE)
        return response

    def _part(
        self, generation: GenerationRequest, index: int, job: Job, output: Output, began: float
    ) -> msgspec.Struct:
        """Return the event for `output`."""
        answer = self._reply(generation, job, output, began)
        if generation.single:
            return answer
        return StreamPart(text=answer.text, output_ids=answer.output_ids, meta_info=answer.meta_info, index=index)

    def _reply(self, generation: GenerationRequest, job: Job, output: Output, began: float) -> GenerateReply:
        return reply(output, job, text=self._text, return_logprob=generation.return_logprob, began=began)

    def _abandon(self, tickets: list[Ticket]) -> None:
        """Abort unfinished jobs that no client waits for any more."""

        async def abort(unfinished: list[Ticket]) -> None:
            for ticket in unfinished:
                await self._engine.abort(ticket.job.rid)

        unfinished = [ticket for ticket in tickets if not ticket.done]
        if unfinished:
            task = asyncio.create_task(abort(unfinished), name="abort of an abandoned request")
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _health_generate(self, request: web.Request) -> web.Response:
        job = Job(rid=f"health-{time.monotonic_ns()}", input_ids=[0], params=SamplingParams(max_new_tokens=1))
        ticket = self._engine.submit(job)
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await ticket.result()
        except TimeoutError:
            return _json(_error(Refused(f"no token within {HEALTH_SECONDS:.0f} s; is generation paused?")), status=503)
        finally:
            self._abandon([ticket])
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return _json(ModelInfo(model_path=self._engine.model_path, weight_version=self._engine.weight_version))

    async def _server_info(self, request: web.Request) -> web.Response:
        return _json(
            {
                "engine": self._engine.name,
                "staged_weight_update": True,
                "stats": self._engine.stats(),
                "model_path": self._engine.model_path,
                "weight_version": self._engine.weight_version,
                "vocab_size": self._engine.vocab_size,
                "context_length": self._engine.max_context,
                "max_running_requests": self._engine.max_running,
            }
        )

    async def _pause(self, message: PauseGeneration) -> Outcome:
        await self._engine.pause(message.mode)
        return Outcome(success=True, message=f"paused with mode {message.mode}")

    async def _continue(self, message: Empty) -> Outcome:
        await self._engine.resume()
        return Outcome(success=True, message="generation continues")

    async def _abort(self, message: AbortRequest) -> Outcome:
        if message.abort_all:
            return Outcome(success=True, message=f"{await self._engine.abort_all()} requests aborted")
        if not message.rid:
            raise Refused("give a rid, or abort_all = true")
        names = self._live.get(message.rid, [message.rid])
        aborted = [name for name in names if await self._engine.abort(name)]
        return Outcome(success=True, message=f"{len(aborted)} responses of request {message.rid} aborted")

    async def _join_group(self, message: InitWeightsUpdateGroup) -> Outcome:
        await self._engine.receiver.join_group(message)
        return Outcome(success=True, message=f"joined {message.group_name} as rank {message.rank_offset}")

    async def _leave_group(self, message: DestroyWeightsUpdateGroup) -> Outcome:
        await self._engine.receiver.leave_group(message.group_name)
        return Outcome(success=True, message=f"left {message.group_name}")

    async def _begin_update(self, message: Empty) -> Outcome:
        await self._engine.receiver.begin()
        return Outcome(success=True, message="a weight update has begun")

    async def _receive(self, message: UpdateWeightsFromDistributed) -> Outcome:
        await self._engine.receiver.receive(message)
        return Outcome(success=True, message=f"{len(message.names)} tensors received")

    async def _end_update(self, message: Empty) -> Outcome:
        return Outcome(success=True, message=await self._engine.end_update())

    async def _load(self, message: UpdateWeightsFromDisk) -> Outcome:
        if message.abort_all_requests:
            await self._engine.abort_all()
        return Outcome(success=True, message=await self._engine.load(Path(message.model_path), message.weight_version))

    async def _set_version(self, message: UpdateWeightVersion) -> Outcome:
        if message.abort_all_requests:
            await self._engine.abort_all()
        await self._engine.set_version(message.new_version)
        return Outcome(success=True, message=f"the weights are now called {message.new_version}")

    async def _checksum(self, message: WeightsChecker) -> Any:
        if message.action == "staged":
            return StagedSums(tensors=await self._engine.receiver.staged_sums())
        if message.action == "received":
            raise Refused('new weights are kept aside here: ask for "staged"')
        return await self._engine.checksum()


async def _merged(tickets: list[Ticket]) -> AsyncIterator[list[tuple[int, Output]]]:
    """Yield the updates of all tickets with their indices until each is finished; simultaneous ones come together.

    Raises `GenerationFailed`.
    """
    queue: asyncio.Queue[tuple[int, Output] | StreamRLError] = asyncio.Queue()

    async def forward(index: int, ticket: Ticket) -> None:
        try:
            async for output in ticket.updates():
                queue.put_nowait((index, output))
        except StreamRLError as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(i, ticket)) for i, ticket in enumerate(tickets)]
    try:
        unfinished = len(tasks)
        while unfinished:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            updates = []
            for item in items:
                if isinstance(item, StreamRLError):
                    raise item
                updates.append(item)
            yield updates
            unfinished -= sum(output.finish_reason is not None for _, output in updates)
    finally:
        await cancel(*tasks)


def _post(path: str, body: type[Body], call: Callable[[Body], Awaitable[Any]]) -> web.RouteDef:
    """Return a route whose call takes a `body` and returns a Struct."""

    async def handle(request: web.Request) -> web.Response:
        return _json(await call(await _read(request, body)))

    return web.post(path, handle)


async def _read(request: web.Request, body: type[Body]) -> Body:
    content = await request.read()
    try:
        return msgspec.json.decode(content or b"{}", type=body)
    except UNDECODABLE as error:
        raise Refused(f"the body of {request.path} is not valid: {error}") from error


EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
DONE = b"data: [DONE]\n\n"


def _event(content: msgspec.Struct) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (Refused, ModelError) as error:
        return _json(_error(error), status=400)
    except QueueFull as error:
        return _json(_error(error), status=503)
    except StreamRLError as error:
        log.warning("%s %s failed: %s", request.method, request.path, error)
        return _json(_error(error), status=500)
    except web.HTTPException as error:
        return _json(_error(f"{request.method} {request.path}: {error.reason}"), status=error.status)
    except ClientConnectionResetError:
        log.debug("%s %s: the client has left", request.method, request.path)
        raise
    except Exception as error:  # tolerance point: one request, not the server
        log.exception("%s %s failed", request.method, request.path)
        return _json(_error(f"fault of the gserver: {type(error).__name__}: {error}"), status=500)


def _check_caller(keys: GserverKeys, hosts: Hosts) -> Middleware:
    warnings = RateLimitedLog(log)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := hosts.forged(request.headers.get("Host"), request.headers.get("Origin")):
            return _json(_error(f"{request.path[:100]!r}: {why}"), status=403)
        shown = request.headers.get(HEADER)
        if request.path == "/health" or (keys.control and admits(keys.control, shown)):
            return await handler(request)
        generates = admits(keys.generation, shown)
        if not generates:
            warnings.warning("refused %s of somebody without the key", request.path[:100])
            return _json(_error("this call needs the key that members of the run are given"), status=401)
        if keys.control and request.path not in GENERATION_CALLS:
            warnings.warning("refused %s: the key permits generation only", request.path[:100])
            return _json(_error(f"{request.path[:100]!r}: only the manager may change a gserver"), status=403)
        return await handler(request)

    return check


def _error(error: StreamRLError | str) -> ErrorReply:
    return ErrorReply(error=ErrorDetail(message=str(error)))


def _json(content: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=_encode(content), status=status, content_type="application/json")
