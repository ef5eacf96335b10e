"""OpenAI's completions: `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from streamrl.rollout.agents.messages import ChatRequest, Completion
from streamrl.rollout.agents.protocols import common
from streamrl.rollout.agents.protocols.common import Call

error = common.openai_error


class _Body(msgspec.Struct):
    prompt: str | list[int]
    model: str = ""
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None


def parse(raw: bytes) -> Call:
    """Check a request's body."""
    body = common.decode(raw, _Body)
    common.refuse_present(
        {
            "echo": body.echo,
            "suffix": body.suffix,
            "best_of": (body.best_of or 1) > (body.n or 1),
            "logit_bias": body.logit_bias,
            "frequency_penalty": body.frequency_penalty,
            "presence_penalty": body.presence_penalty,
            "logprobs": (body.logprobs or 0) > 1,
        }
    )
    n = 1 if body.n is None else body.n
    common.check_counts(n, body.max_tokens, "max_tokens")
    return Call(
        request=ChatRequest(
            prompt=body.prompt if isinstance(body.prompt, str) else tuple(body.prompt),
            n=n,
            max_tokens=body.max_tokens,
            stop=common.stops(body.stop),
        ),
        model=body.model,
        stream=bool(body.stream),
        logprobs=body.logprobs is not None,
        overridden=common.present({"temperature": body.temperature, "top_p": body.top_p}),
    )


def reply(call: Call, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answer's body."""
    choices = []
    for index, completion in enumerate(completions):
        logprobs = {"tokens": completion.token_texts, "token_logprobs": completion.logprobs, "top_logprobs": None}
        choices.append(
            {
                "index": index,
                "text": completion.message.content,
                "finish_reason": completion.finish_reason,
                "logprobs": logprobs if call.logprobs else None,
            }
        )
    head = {"id": f"cmpl-{call.id}", "object": "text_completion", "created": call.created, "model": call.model}
    return {**head, "choices": choices, "usage": common.usage(completions)}


def events(call: Call, completions: Sequence[Completion]) -> Iterator[bytes]:
    """Return the answer as server-sent events."""
    yield common.event(reply(call, completions))
    yield b"data: [DONE]\n\n"
