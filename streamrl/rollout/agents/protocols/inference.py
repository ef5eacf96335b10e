"""The token endpoint of the verifiers ecosystem: `POST /inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.rollout.agents.messages import ChatRequest, Completion
from streamrl.rollout.agents.protocols import common
from streamrl.rollout.agents.protocols.common import CheckedRequest

error = common.openai_error


class _Sampling(common.SamplingFields):
    n: common.Samples = 1
    max_tokens: common.TokenCount | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[common.TokenId] | None = None


class _GenerateBody(msgspec.Struct):
    token_ids: common.TokenIds
    model: str = ""
    sampling_params: _Sampling = msgspec.field(default_factory=_Sampling)
    features: Any = None
    content_parts: Any = None


def parse(raw: bytes) -> CheckedRequest:
    """Check a request's body."""
    body = common.decode(raw, _GenerateBody)
    common.refuse_present({"features": body.features, "content_parts": body.content_parts})
    asked = body.sampling_params
    return CheckedRequest(
        request=ChatRequest(
            prompt=tuple(body.token_ids),
            n=asked.n,
            max_tokens=asked.max_tokens,
            stop=common.stops(asked.stop),
            stop_token_ids=tuple(asked.stop_token_ids or ()),
        ),
        model=body.model,
        sampling=asked.given(),
    )


def reply(call: CheckedRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answer's body."""
    choices = [
        {
            "index": index,
            "token_ids": completion.output_ids,
            "finish_reason": "length" if completion.finish_reason == "length" else "stop",
            "logprobs": {
                "content": [
                    {"token": f"token_id:{token}", "logprob": logprob}
                    for token, logprob in zip(completion.output_ids, completion.logprobs, strict=True)
                ]
            },
        }
        for index, completion in enumerate(completions)
    ]
    return {"request_id": call.id, "choices": choices}
