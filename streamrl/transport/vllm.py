"""vLLM's token endpoint as a gserver: the calls of `GenerationClient` for servers that speak no SGLang.

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

MOST_SEEDS = 2**63


class VllmBody(msgspec.Struct, frozen=True):
    """Body of POST /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]


class VllmTokenScore(msgspec.Struct, frozen=True):
    """A sampled token with its log-probability in nats."""

    token_id: int
    logprob: float


class VllmTokenScores(msgspec.Struct, frozen=True):
    """One entry for each sampled token."""

    content: list[VllmTokenScore] = []


class VllmResponse(msgspec.Struct, frozen=True):
    """A response."""

    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The token or string that ended it; None if it was the end-of-sequence token."""
    logprobs: VllmTokenScores | None = None
    weight_versions: list[VersionSpan] | None = None


class VllmReply(msgspec.Struct, frozen=True):
    """Reply with one response."""

    choices: list[VllmResponse]


class VllmModels(msgspec.Struct, frozen=True):
    """Part of /v1/models."""

    data: list[dict[str, Any]]


class VllmGenerationClient(GenerationClient):
    """Generates at vLLM servers; responses are not streamed, and arrive whole."""

    async def generate(self, url: str, request: GenerateRequest) -> GenerateReply:
        params, rid, prompt = request.sampling_params, request.rid, request.input_ids
        assert isinstance(params, SamplingParams)
        assert isinstance(rid, str)
        body = VllmBody(rid, prompt, _sampling(params))  # type: ignore[arg-type]
        reply = await self.post(url, "/inference/v1/generate", body, VllmReply)
        if len(reply.choices) != 1:
            raise WireError(f"vLLM at {url} answered one prompt with {len(reply.choices)} responses")
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


def _sampling(params: SamplingParams) -> dict[str, Any]:
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_tokens": params.max_new_tokens,
        "stop": stop,
        "stop_token_ids": params.stop_token_ids or [],
        "seed": None if params.sampling_seed is None else params.sampling_seed % MOST_SEEDS,
        "logprobs": 0,
        "detokenize": bool(stop),
        "skip_special_tokens": False,
    }


def reply_of(response: VllmResponse, *, rid: str, limit: int) -> GenerateReply:
    """Return a response of at most `limit` tokens as a gserver's reply."""
    scores = response.logprobs.content if response.logprobs is not None else []
    match response.finish_reason:
        case "length":
            finish = FinishReason("length", length=limit)
        case "stop":
            last = response.token_ids[-1] if response.token_ids else None
            finish = FinishReason("stop", matched=last if response.stop_reason is None else response.stop_reason)
        case other:
            finish = FinishReason("abort", message=f"vLLM ended the response with {other!r}")
    spans = response.weight_versions
    return GenerateReply(
        text="",
        output_ids=response.token_ids,
        meta_info=MetaInfo(
            id=rid,
            finish_reason=finish,
            completion_tokens=len(response.token_ids),
            weight_version=spans[-1].version if spans else INITIAL_WEIGHT_VERSION,
            weight_versions=spans,
            output_token_logprobs=[(score.logprob, score.token_id, None) for score in scores],
        ),
    )
