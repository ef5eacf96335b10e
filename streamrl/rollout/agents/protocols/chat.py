"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from streamrl.rollout.agents.messages import (
    ChatRequest,
    Completion,
    Message,
    MessagePiece,
    RequestRefused,
    StreamedAnswer,
    ToolCall,
)
from streamrl.rollout.agents.protocols import common
from streamrl.rollout.agents.protocols.common import CheckedRequest

error = common.openai_error


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct):
    id: str
    function: _Function


class _ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: common.Content = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _ChatBody(common.SamplingFields):
    messages: list[_ChatMessage]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    n: common.Samples | None = None
    max_tokens: common.TokenCount | None = None
    max_completion_tokens: common.TokenCount | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[common.TokenId] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: common.TopLogprobs | None = None
    modalities: list[str] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    functions: Any = None
    web_search_options: Any = None


def parse(raw: bytes) -> CheckedRequest:
    """Check a request's body."""
    body = common.decode(raw, _ChatBody)
    if not body.messages:
        raise RequestRefused("messages: there are none")
    common.refuse_present(
        {
            "modalities": body.modalities not in (None, [], ["text"]),
            "functions": body.functions,
            "web_search_options": body.web_search_options is not None,
            "tool_choice": body.tool_choice not in (None, "auto", "none"),
            "add_generation_prompt": body.add_generation_prompt is bool(body.continue_final_message),
        }
    )
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = () if body.tool_choice == "none" else tuple(body.tools or ())
    for tool in tools:
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise RequestRefused("tools: only functions with a name are supported")
    messages, given = tuple(_message(message, index) for index, message in enumerate(body.messages)), ""
    if body.continue_final_message:
        messages, given = common.split_given(messages, f"messages[{len(messages) - 1}]")
    return CheckedRequest(
        request=ChatRequest(
            messages=messages,
            tools=tools,
            given=given,
            n=body.n or 1,
            max_tokens=limit,
            stop=common.stops(body.stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            token_texts=bool(body.logprobs),
        ),
        model=body.model,
        events=ChatEvents if body.stream else None,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        stream_usage=body.stream_options is not None and body.stream_options.include_usage,
        sampling=body.given(),
    )


def _message(message: _ChatMessage, index: int) -> Message:
    where = f"messages[{index}]"
    common.refuse_present({f"{where}.function_call": message.function_call, f"{where}.audio": message.audio})
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=common.text_of(message.content, where),
        reasoning=message.reasoning_content or "",
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id or "",
    )


def _spoken(message: Message, *, indexed: bool) -> dict[str, Any]:
    spoken: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    if message.reasoning:
        spoken["reasoning_content"] = message.reasoning
    if message.tool_calls:
        spoken["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            | ({"index": index} if indexed else {})
            for index, call in enumerate(message.tool_calls)
        ]
    return spoken


def _logprobs(call: CheckedRequest, completion: Completion) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    return {"content": common.token_logprobs(completion, top=call.top_logprobs > 0), "refusal": None}


def _head(call: CheckedRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call.id}", "object": kind, "created": call.created, "model": call.model}


def reply(call: CheckedRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answer's body."""
    choices = [
        {
            "index": index,
            "message": _spoken(completion.message, indexed=False),
            "finish_reason": completion.finish_reason,
            "logprobs": _logprobs(call, completion),
        }
        for index, completion in enumerate(completions)
    ]
    return {**_head(call, "chat.completion"), "choices": choices, "usage": common.usage(completions)}


class ChatEvents:
    """An answer as server-sent events."""

    def __init__(self, call: CheckedRequest) -> None:
        self._call = call
        self._head = _head(call, "chat.completion.chunk")
        self._told: list[StreamedAnswer] = []
        """The sent part of each answer; empty if there was no piece."""

    def piece(self, piece: MessagePiece) -> bytes:
        begun = b"" if self._told else self._begin()
        self._told[piece.index].add(piece)
        delta = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        delta |= {"content": piece.content} if piece.content else {}
        return begun + self._chunk(piece.index, delta)

    def _begin(self) -> bytes:
        """Return the first chunks of all answers, in order: OpenAI's client confuses answers in another order."""
        self._told = [StreamedAnswer() for _ in range(self._call.request.n)]
        return b"".join(self._chunk(index, {"role": "assistant"}) for index in range(len(self._told)))

    def end(self, completions: Sequence[Completion]) -> bytes:
        chunks = []
        for index, completion in enumerate(completions):
            if not self._told:
                delta = _spoken(completion.message, indexed=True)
            else:
                rest = _spoken(self._told[index].rest(completion.message), indexed=True)
                delta = {key: value for key, value in rest.items() if key != "role" and value}
            if delta:
                chunks.append(self._chunk(index, delta, logprobs=_logprobs(self._call, completion)))
            chunks.append(self._chunk(index, {}, finish_reason=completion.finish_reason))
        if self._call.stream_usage:
            chunks.append(common.event({**self._head, "choices": [], "usage": common.usage(completions)}))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def _chunk(self, index: int, delta: dict[str, Any], *, finish_reason: Any = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return common.event({**self._head, "choices": [choice]})
