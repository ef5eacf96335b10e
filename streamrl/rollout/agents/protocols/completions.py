"""OpenAI's completions: `POST /v1/completions`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from streamrl.rollout.agents.messages import ChatRequest, Completion, MessagePiece, StreamedAnswer
from streamrl.rollout.agents.protocols import common
from streamrl.rollout.agents.protocols.common import CheckedRequest

error = common.openai_error


class _CompletionBody(common.SamplingFields):
    prompt: str | common.TokenIds
    model: str = ""
    n: common.Samples | None = None
    max_tokens: common.TokenCount | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[common.TokenId] | None = None
    stream: bool | None = None
    logprobs: common.TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


def parse(raw: bytes) -> CheckedRequest:
    """Check a request's body."""
    body = common.decode(raw, _CompletionBody)
    common.refuse_present(
        {
            "echo": body.echo,
            "suffix": body.suffix,
            "best_of": (body.best_of or 1) > (body.n or 1),
        }
    )
    return CheckedRequest(
        request=ChatRequest(
            prompt=body.prompt if isinstance(body.prompt, str) else tuple(body.prompt),
            n=body.n or 1,
            max_tokens=body.max_tokens,
            stop=common.stops(body.stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            token_texts=body.logprobs is not None,
        ),
        model=body.model,
        events=CompletionEvents if body.stream else None,
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        sampling=body.given(),
    )


def _logprobs(completion: Completion, *, top: bool) -> dict[str, Any]:
    texts, logprobs = completion.token_texts, completion.logprobs
    sampled = [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)]
    offsets = list(itertools.accumulate(map(len, texts[:-1]), initial=0))[: len(texts)]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": sampled if top else None,
        "text_offset": offsets,
    }


def _head(call: CheckedRequest) -> dict[str, Any]:
    return {"id": f"cmpl-{call.id}", "object": "text_completion", "created": call.created, "model": call.model}


def _choice(call: CheckedRequest, index: int, text: str, completion: Completion | None) -> dict[str, Any]:
    done = completion is not None and call.logprobs
    return {
        "index": index,
        "text": text,
        "finish_reason": completion.finish_reason if completion is not None else None,
        "logprobs": _logprobs(completion, top=call.top_logprobs > 0) if completion is not None and done else None,
    }


def reply(call: CheckedRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answer's body."""
    choices = [
        _choice(call, index, completion.message.content, completion) for index, completion in enumerate(completions)
    ]
    return {**_head(call), "choices": choices, "usage": common.usage(completions)}


class CompletionEvents:
    """An answer as server-sent events."""

    def __init__(self, call: CheckedRequest) -> None:
        self._call = call
        self._told: defaultdict[int, StreamedAnswer] = defaultdict(StreamedAnswer)

    def piece(self, piece: MessagePiece) -> bytes:
        self._told[piece.index].add(piece)
        return common.event({**_head(self._call), "choices": [_choice(self._call, piece.index, piece.content, None)]})

    def end(self, completions: Sequence[Completion]) -> bytes:
        choices = [
            _choice(self._call, index, self._told[index].rest(completion.message).content, completion)
            for index, completion in enumerate(completions)
        ]
        last = {**_head(self._call), "choices": choices, "usage": common.usage(completions)}
        return common.event(last) + b"data: [DONE]\n\n"
