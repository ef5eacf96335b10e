"""Anthropic's messages: `POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from streamrl.rollout.agents.messages import ChatRequest, Completion, Message, Piece, RequestRefused, ToolCall
from streamrl.rollout.agents.protocols import common
from streamrl.rollout.agents.protocols.common import Call


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: common.Content = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = msgspec.field(default_factory=dict)


class _Choice(msgspec.Struct):
    type: str = "auto"


class _Body(common.SamplingFields):
    messages: list[_Message]
    max_tokens: int
    model: str = ""
    system: common.Content = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def parse(raw: bytes) -> Call:
    """Check a request's body."""
    body = common.decode(raw, _Body)
    if not body.messages:
        raise RequestRefused("messages: there are none")
    common.check_counts(1, body.max_tokens, "max_tokens")
    choice = body.tool_choice.type if body.tool_choice else "auto"
    common.refuse_present({"tool_choice": choice not in ("auto", "none")})
    messages = [Message(role="system", content=system)] if (system := common.text_of(body.system, "system")) else []
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    tools = tuple(
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
        }
        for tool in (body.tools or () if choice != "none" else ())
    )
    return Call(
        request=ChatRequest(
            messages=tuple(messages),
            tools=tools,
            max_tokens=body.max_tokens,
            stop=common.stops(body.stop_sequences),
        ),
        model=body.model,
        stream=bool(body.stream),
        sampling=body.given(),
    )


def _messages(message: _Message, where: str) -> list[Message]:
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results, texts, thoughts, calls = [], [], [], []
    for block in message.content:
        match block.type:
            case "text":
                texts.append(block.text)
            case "thinking":
                thoughts.append(block.thinking)
            case "tool_use":
                calls.append(ToolCall(id=block.id, name=block.name, arguments=_arguments(block.input)))
            case "tool_result":
                content = common.text_of(block.content, where)
                results.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
            case other:
                raise RequestRefused(f"{where}: content of type {other!r} is not supported")
    if texts or thoughts or calls or not results:
        said = Message(message.role, "".join(texts), "".join(thoughts), tuple(calls))
        results.append(said)
    return results


def _arguments(written: msgspec.Raw) -> str:
    """Return the text of a tool call's arguments; a JSON string holds one that is not a JSON object."""
    found = msgspec.json.decode(written)
    return found if isinstance(found, str) else bytes(written).decode()


def _input(arguments: str) -> msgspec.Raw:
    """Return arguments as they were written, in a JSON string where they are not a JSON object."""
    try:
        msgspec.json.decode(arguments, type=dict)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(arguments))
    return msgspec.Raw(arguments.encode())


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _head(call: Call) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.model}


def reply(call: Call, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answer's body."""
    said = completions[0]
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[said.finish_reason]
    return {
        **_head(call),
        "content": _blocks(said.message),
        "stop_reason": "stop_sequence" if said.matched_stop else reason,
        "stop_sequence": said.matched_stop or None,
        "usage": {"input_tokens": len(said.prompt_ids), "output_tokens": len(said.output_ids)},
    }


class Events:
    """An answer as server-sent events. A block of text stays open for as long as more of it may come."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._told: common.Told | None = None
        self._blocks = 0
        self._open = False

    def piece(self, piece: Piece) -> bytes:
        found = []
        if self._told is None:
            self._told = common.Told()
            found.append(self._start({"input_tokens": 0, "output_tokens": 0}))
        self._told.add(piece)
        if piece.reasoning:
            found.append(self._block({"type": "thinking", "thinking": piece.reasoning, "signature": ""}))
        if piece.content:
            found.append(self._text(piece.content))
        return b"".join(found)

    def end(self, completions: Sequence[Completion]) -> bytes:
        whole = reply(self._call, completions)
        message = completions[0].message
        found = []
        if self._told is None:
            found.append(self._start(whole["usage"]))
        else:
            message = self._told.rest(message)
        if self._open:
            found.append((self._text(message.content) if message.content else b"") + self._closed())
            message = msgspec.structs.replace(message, content="")
            blocks = _blocks(message) if message.tool_calls else []
        else:
            blocks = _blocks(message)
        found += [self._block(block) for block in blocks]
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        found.append(common.event({"type": "message_delta", "delta": end, "usage": whole["usage"]}, "message_delta"))
        found.append(common.event({"type": "message_stop"}, "message_stop"))
        return b"".join(found)

    def _start(self, usage: dict[str, int]) -> bytes:
        message = {**_head(self._call), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return common.event({"type": "message_start", "message": message}, "message_start")

    def _text(self, more: str) -> bytes:
        begun = b"" if self._open else self._opened({"type": "text", "text": ""})
        self._open = True
        return begun + self._delta({"type": "text_delta", "text": more})

    def _block(self, block: dict[str, Any]) -> bytes:
        empty: dict[str, Any]
        match block["type"]:
            case "text":
                empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
            case "thinking":
                empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
            case _:
                written = bytes(block["input"]).decode()
                empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": written}
        return self._opened({**block, **empty}) + self._delta(delta) + self._closed()

    def _opened(self, block: dict[str, Any]) -> bytes:
        opened = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        return common.event(opened, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        told = {"type": "content_block_delta", "index": self._blocks, "delta": delta}
        return common.event(told, "content_block_delta")

    def _closed(self) -> bytes:
        self._open = False
        closed = common.event({"type": "content_block_stop", "index": self._blocks}, "content_block_stop")
        self._blocks += 1
        return closed


events = Events


def error(status: int, kind: str, message: str) -> dict[str, Any]:
    """Return an error's body."""
    return {"type": "error", "error": {"type": kind, "message": message}}
