"""vLLM's HTTP API as a gserver uses it: its calls, each with a deadline, the requests to vLLM from a gserver's jobs,
and a gserver's outputs from vLLM's replies.

Every call raises `PeerError` if vLLM refuses it, `PeerLost` if the server is gone, and `DeadlineExceeded` if it does
not reply in time.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.gserver.server.engine import Job, Output
from streamrl.transport.generation import Empty, FinishReason
from streamrl.transport.http import call, follow, send
from streamrl.transport.vllm import (
    GENERATE,
    Candidate,
    Choice,
    PromptScore,
    TokenReply,
    TokenRequest,
    finish_reason,
    sampling,
)

PEER = "vLLM"
ADAPTER = "streamrl"
"""Name of the adapter that requests use."""


class AbortRequests(msgspec.Struct, frozen=True):
    """End these requests, with their tokens so far; all if none is named."""

    request_ids: list[str]


class RankCall(msgspec.Struct, frozen=True):
    """Call a method in each rank."""

    method: str
    kwargs: dict[str, str]


class LoadAdapter(msgspec.Struct, frozen=True):
    """Load an adapter in peft's format."""

    lora_name: str
    lora_path: str
    load_inplace: bool = True
    """Whether it replaces a loaded adapter of this name."""


class ServedModel(msgspec.Struct, frozen=True):
    """The model, or an adapter, which has no `max_model_len`."""

    max_model_len: int | None = None


class ServedModels(msgspec.Struct, frozen=True):
    """Part of /v1/models; the model comes first."""

    data: list[ServedModel]


class NewVersion(msgspec.Struct, frozen=True):
    """Name the served weights."""

    new_version: str


class VllmClient:
    """Calls one server; `timeout`: deadline of each call in seconds, and `request_seconds` that of a response."""

    def __init__(self, session: aiohttp.ClientSession, *, url: str, timeout: float, request_seconds: float) -> None:
        self._session = session
        self._url = url
        self._timeout = timeout
        self._request_seconds = request_seconds

    async def generate(self, request: TokenRequest, on_reply: Callable[[TokenReply], None]) -> None:
        """Generate a response; `on_reply` receives it, whole or as the events of a stream."""
        url, seconds = self._url + GENERATE, self._request_seconds
        if request.stream:
            decode = msgspec.json.Decoder(TokenReply).decode
            await follow(self._session, url, request, lambda event: on_reply(decode(event)), timeout=seconds, peer=PEER)
        else:
            on_reply(await call(self._session, url, request, TokenReply, timeout=seconds, peer=PEER))

    async def abort(self, request_ids: list[str]) -> None:
        """End the requests, or all if none is named, with their tokens so far; unknown ones are ignored."""
        await self._post("/abort_requests", AbortRequests([f"generate-tokens-{name}" for name in request_ids]))

    async def max_context(self) -> int:
        """Return the longest context, in tokens."""
        url = f"{self._url}/v1/models"
        found = await call(self._session, url, None, ServedModels, timeout=self._timeout, peer=PEER)
        return found.data[0].max_model_len or 0

    async def pause(self) -> None:
        """Stop between two steps; running requests stay as they are."""
        await self._post("/pause?mode=keep&clear_cache=false", Empty())

    async def resume(self) -> None:
        """Continue after a pause."""
        await self._post("/resume", Empty())

    async def load(self, folder: Path) -> None:
        """Load the weights in `folder`, a checkpoint, over those that are served."""
        body = RankCall("reload_weights", {"weights_path": str(folder)})
        await self._post("/collective_rpc", body)

    async def load_adapter(self, folder: Path) -> None:
        """Load the adapter in `folder` in place of the one that is loaded; running requests continue with it."""
        await self._post("/v1/load_lora_adapter", LoadAdapter(ADAPTER, str(folder)))

    async def name_weights(self, version: str) -> None:
        """Name the served weights `version` from the next token on."""
        await self._post("/update_weight_version", NewVersion(version))

    async def forget_prompts(self) -> None:
        """Forget the cached prompts, those of running requests, too, which are then computed again."""
        await self._post("/reset_prefix_cache?reset_running_requests=true", Empty())

    async def _post(self, path: str, body: msgspec.Struct) -> None:
        await send(self._session, self._url + path, body, timeout=self._timeout, peer=PEER)


# --- responses ---


def request(job: Job, *, request_id: str, version: str, adapter: str | None = None) -> TokenRequest:
    """Return the request for `job`. `version`: the name of the weights that are served now. `adapter`: the adapter's
    name; None: there is none.

    Prompts that were cached under other weights are not used, since requests of each version share only their own.
    """
    params = job.params
    scores_prompt = job.logprob_start_len >= 0
    return TokenRequest(
        request_id=request_id,
        token_ids=job.input_ids,
        cache_salt=version,
        model=adapter,
        stream=job.stream and not scores_prompt and params.max_new_tokens > 0,  # streams have no scores of prompts
        sampling_params=sampling(
            params, stop=list(job.stop), top_logprobs=job.top_logprobs_num, scores_prompt=scores_prompt
        ),
    )


class ResponseBuilder:
    """The response to one job so far."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[float, int]]] = []
        self._input_logprobs: list[float | None] = []
        self._input_top: list[list[tuple[float, int]] | None] = []
        self._cached = 0
        self._reported = 0
        """Number of tokens in the last output."""
        self.retractions = 0
        """How often it was stopped to be computed again under new weights."""

    def add(self, reply: TokenReply, *, version: str) -> Output | None:
        """Add the reply, or the event of a stream; return an output if it is due. `version`: of the served weights."""
        if reply.prompt_logprobs is not None:
            self._add_prompt(reply.prompt_logprobs)
        if reply.usage is not None and reply.usage.prompt_tokens_details is not None:
            self._cached = reply.usage.prompt_tokens_details.cached_tokens or 0
        for choice in reply.choices:
            self._add_tokens(choice)
            if choice.finish_reason is not None:
                return self._finished(choice, version)
        due = 1 if not self._reported else self._reported + self._job.stream_interval
        if len(self._ids) < due:
            return None
        self._reported = len(self._ids)
        return self._output(version)

    def aborted(self, *, version: str) -> Output:
        """Return the output of a job that vLLM has not begun."""
        return self._finished(Choice(finish_reason="abort"), version)

    def _add_tokens(self, choice: Choice) -> None:
        self._ids += choice.token_ids or []
        wanted = self._job.top_logprobs_num
        for score in (choice.logprobs.content if choice.logprobs else None) or []:
            self._logprobs.append(score.logprob)
            if wanted:
                self._top.append(_likeliest(score.top_logprobs, wanted))

    def _add_prompt(self, scores: list[dict[int, PromptScore] | None]) -> None:
        start, wanted = self._job.logprob_start_len, self._job.top_logprobs_num
        for token, found in zip(self._job.input_ids[start:], scores[start:], strict=True):
            self._input_logprobs.append(None if found is None else found[token].logprob)
            if wanted:
                candidates = [Candidate(name, score.logprob) for name, score in (found or {}).items()]
                self._input_top.append(None if found is None else _likeliest(candidates, wanted))

    def _finished(self, choice: Choice, version: str) -> Output:
        spans = choice.weight_versions or []
        reason = self._reason(choice)
        routes = _routes(choice.routed_experts) if self._job.return_routed_experts else None
        if self._job.params.max_new_tokens == 0:  # vLLM makes at least one token
            self._ids, self._logprobs, self._top = [], [], []
            routes = None if routes is None else routes[: len(self._job.input_ids) - 1]
        return self._output(
            spans[-1].version if spans else version,
            finish_reason=reason,
            spans=spans if self._ids else [],
            routed_experts=routes,
        )

    def _reason(self, choice: Choice) -> FinishReason:
        limit = self._job.params.max_new_tokens
        if not limit and choice.finish_reason != "abort":
            return FinishReason("length", length=0)
        return finish_reason(choice, limit=limit, last=self._ids[-1] if self._ids else None)

    def _output(self, version: str, **end: object) -> Output:
        return Output(
            output_ids=list(self._ids),
            logprobs=list(self._logprobs),
            weight_version=version,
            top_logprobs=list(self._top),
            input_logprobs=self._input_logprobs,
            input_top_logprobs=self._input_top,
            cached_tokens=self._cached,
            num_retractions=self.retractions,
            **end,  # type: ignore[arg-type]
        )


def _likeliest(candidates: list[Candidate], count: int) -> list[tuple[float, int]]:
    """Return log-probability and token of the `count` most likely candidates."""
    ordered = sorted(candidates, key=lambda candidate: -candidate.logprob)
    return [(candidate.logprob, candidate.token_id) for candidate in ordered[:count]]


def _routes(encoded: str | None) -> NDArray[np.uint8] | None:
    if encoded is None:
        return None
    experts: NDArray[np.uint8] = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False).astype(np.uint8)
    return experts
