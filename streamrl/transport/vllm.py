"""vLLM's token endpoint: its requests and replies, and the calls of `GenerationClient` for it.

vLLM 0.32 has the endpoint if it was started with `--enable-scale-out`; `--logprobs-mode processed_logprobs` makes its
log-probabilities those of the sampled temperature. Replies name the weights that sampled each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from streamrl.errors import WireError, first_error
from streamrl.transport.generation import (
    INITIAL_WEIGHT_VERSION,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    GenerationClient,
    MetaInfo,
    ModelInfo,
    SamplingParams,
    VersionSpan,
)

GENERATE = "/inference/v1/generate"
SEEDS = 2**63


class VllmSampling(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's sampling parameters."""

    temperature: float
    top_p: float
    top_k: int
    """-1: no limit."""
    min_p: float
    max_tokens: int
    """At least 1."""
    min_tokens: int
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    seed: int | None
    logprobs: int
    """Number of most likely tokens with log-probabilities, in addition to the sampled one."""
    prompt_logprobs: int | None
    """The same for the prompt; None: none."""
    detokenize: bool
    """Whether vLLM makes the text, in which it looks for stop strings."""
    skip_special_tokens: bool = False


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    sampling_params: VllmSampling
    cache_salt: str | None = None
    """Only requests with the same salt share cached prompts."""
    stream: bool = False
    model: str | None = None
    """Name of a loaded adapter; None: the model without one."""


class Candidate(msgspec.Struct, frozen=True):
    """A token and its log-probability in nats."""

    token_id: int
    logprob: float


class TokenScore(msgspec.Struct, frozen=True):
    """The sampled token, and the most likely ones."""

    token_id: int
    logprob: float
    top_logprobs: list[Candidate] = []


class TokenScores(msgspec.Struct, frozen=True):
    """One entry for each token."""

    content: list[TokenScore] | None = None


class PromptScore(msgspec.Struct, frozen=True):
    """The log-probability of a prompt's token."""

    logprob: float


class Choice(msgspec.Struct, frozen=True):
    """A response, or in a stream its new tokens."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The token or string that ended it; None if it was the end-of-sequence token."""
    logprobs: TokenScores | None = None
    weight_versions: list[VersionSpan] | None = None
    """Of the whole response; with its end only."""
    routed_experts: str | None = None
    """Base64 of a NumPy file with `[tokens - 1, layers, top_k]`, of prompt and response without the last token."""


class PromptDetails(msgspec.Struct, frozen=True):
    """Part of the usage."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens_details: PromptDetails | None = None


class TokenReply(msgspec.Struct, frozen=True):
    """Reply to `TokenRequest`, or an event of its stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, PromptScore] | None] | None = None
    """For each token of the prompt, token → score; None for the first."""
    error: msgspec.Raw = msgspec.Raw()
    """In a stream: the error that ends it."""


class VllmModels(msgspec.Struct, frozen=True):
    """Part of /v1/models."""

    data: list[dict[str, Any]]


class VllmGenerationClient(GenerationClient):
    """Generates at vLLM servers; responses are not streamed, and arrive whole."""

    async def generate(self, url: str, request: GenerateRequest) -> GenerateReply:
        params, rid, prompt = request.sampling_params, request.rid, request.input_ids
        assert isinstance(params, SamplingParams)
        assert isinstance(rid, str)
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        body = TokenRequest(request_id=rid, token_ids=prompt, sampling_params=sampling(params, stop=stop))  # type: ignore[arg-type]
        reply = await self.post(url, GENERATE, body, TokenReply)
        if len(reply.choices) != 1:
            raise WireError(f"vLLM at {url} returned {len(reply.choices)} responses to one prompt")
        return reply_of(reply.choices[0], rid=rid, limit=params.max_new_tokens)

    async def generate_streamed(
        self, url: str, request: GenerateRequest, on_part: Callable[[GenerateReply], None]
    ) -> GenerateReply:
        return await self.generate(url, request)

    async def generate_batch(
        self, url: str, requests: Sequence[GenerateRequest], on_reply: Callable[[int, GenerateReply], None]
    ) -> None:
        async def one(index: int) -> None:
            on_reply(index, await self.generate(url, requests[index]))

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(requests)):
                    tasks.create_task(one(index))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def model_info(self, url: str) -> ModelInfo:
        """Return the served model. Its version is in each reply."""
        found = await self.get(url, "/v1/models", VllmModels)
        return ModelInfo(str(found.data[0]["id"]) if found.data else "", INITIAL_WEIGHT_VERSION)


def sampling(
    params: SamplingParams, *, stop: list[str], top_logprobs: int = 0, scores_prompt: bool = False
) -> VllmSampling:
    """Return vLLM's parameters. `stop`: the strings that end the response; `top_logprobs`: number of most likely tokens
    with log-probabilities; `scores_prompt`: whether the prompt's tokens have log-probabilities, too."""
    return VllmSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        max_tokens=max(params.max_new_tokens, 1),
        min_tokens=params.min_new_tokens,
        stop=stop,
        stop_token_ids=params.stop_token_ids or [],
        ignore_eos=params.ignore_eos,
        seed=None if params.sampling_seed is None else params.sampling_seed % SEEDS,
        logprobs=top_logprobs,
        prompt_logprobs=top_logprobs if scores_prompt else None,
        detokenize=bool(stop),
    )


def finish_reason(choice: Choice, *, limit: int, last: int | None) -> FinishReason:
    """Return why a response of at most `limit` tokens ended; `last`: its last token."""
    match choice.finish_reason:
        case "length":
            return FinishReason("length", length=limit)
        case "stop":
            return FinishReason("stop", matched=last if choice.stop_reason is None else choice.stop_reason)
        case "abort":
            return FinishReason("abort", message="the request was aborted")
        case other:
            return FinishReason("abort", message=f"vLLM ended the response with {other!r}")


def reply_of(choice: Choice, *, rid: str, limit: int) -> GenerateReply:
    """Return a response of at most `limit` tokens as a gserver's reply."""
    tokens, spans = choice.token_ids or [], choice.weight_versions
    scores = (choice.logprobs.content if choice.logprobs is not None else None) or []
    return GenerateReply(
        text="",
        output_ids=tokens,
        meta_info=MetaInfo(
            id=rid,
            finish_reason=finish_reason(choice, limit=limit, last=tokens[-1] if tokens else None),
            completion_tokens=len(tokens),
            weight_version=spans[-1].version if spans else INITIAL_WEIGHT_VERSION,
            weight_versions=spans,
            output_token_logprobs=[(score.logprob, score.token_id, None) for score in scores],
        ),
    )
