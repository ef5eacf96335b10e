"""Anthropic's messages: `POST /v1/messages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from streamrl.rollout.agents.messages import (
    TOO_LONG,
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

_SIGNATURE = "streamrl"
"""Signature of the policy's thinking in answers. It is not verified, but clients treat thinking without a signature as
broken off, and send it back as text, which makes it another conversation."""


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: common.Content = None


class _AnthropicMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _AnthropicTool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str = ""
    input_schema: dict[str, Any] = msgspec.field(default_factory=dict)


class _Choice(msgspec.Struct):
    type: str = "auto"
    disable_parallel_tool_use: bool | None = None


class _OutputConfig(msgspec.Struct):
    format: Any = None


class _MessagesBody(common.SamplingFields):
    messages: list[_AnthropicMessage]
    max_tokens: common.TokenCount
    model: str = ""
    system: common.Content = None
    tools: list[_AnthropicTool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_format: Any = None
    output_config: _OutputConfig | None = None
    mcp_servers: Any = None
    container: Any = None


def parse(raw: bytes) -> CheckedRequest:
    """Check a request's body."""
    body = common.decode(raw, _MessagesBody)
    if not body.messages:
        raise RequestRefused("messages: there are none")
    choice = body.tool_choice.type if body.tool_choice else "auto"
    alone = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    one_call = {"tool_choice.disable_parallel_tool_use": True} if alone else {}
    common.refuse_present(
        {
            "tool_choice": choice not in ("auto", "none"),
            "output_format": body.output_format,
            "output_config.format": body.output_config and body.output_config.format,
            "mcp_servers": body.mcp_servers,
            "container": body.container,
        }
    )
    messages = [Message(role="system", content=system)] if (system := common.text_of(body.system, "system")) else []
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]")
    conversation, given = tuple(messages), ""
    if messages[-1].role == "assistant":
        conversation, given = common.split_given(messages, f"messages[{len(body.messages) - 1}]")
    tools = tuple(map(_tool, body.tools or () if choice != "none" else ()))
    return CheckedRequest(
        request=ChatRequest(
            messages=conversation,
            tools=tools,
            given=given,
            max_tokens=body.max_tokens,
            stop=common.stops(body.stop_sequences),
        ),
        model=body.model,
        events=MessageEvents if body.stream else None,
        sampling=body.given() | one_call,
    )


def _tool(tool: _AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestRefused(f"tools: only those with an input_schema are supported, not {tool.type!r}")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _messages(message: _AnthropicMessage, where: str) -> list[Message]:
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
    """Return the text of a tool call's arguments; text that is not a JSON object comes inside a JSON string."""
    found = msgspec.json.decode(written)
    return found if isinstance(found, str) else bytes(written).decode()


def _input(arguments: str) -> msgspec.Raw:
    """Return the arguments unchanged, or inside a JSON string if they are not a JSON object."""
    try:
        msgspec.json.decode(arguments, type=dict)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(arguments))
    return msgspec.Raw(arguments.encode())


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _head(call: CheckedRequest) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.model}


def reply(call: CheckedRequest, completions: Sequence[Completion]) -> dict[str, Any]:
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


class MessageEvents:
    """An answer as server-sent events. A block of text or thinking stays open while more of it may arrive."""

    def __init__(self, call: CheckedRequest) -> None:
        self._call = call
        self._told = StreamedAnswer()
        self._begun = False
        self._blocks = 0
        self._open = ""
        """The type of the open block, whose number is `_blocks`; empty if none is open."""

    def piece(self, piece: MessagePiece) -> bytes:
        self._told.add(piece)
        return self._begin() + self._more("thinking", piece.reasoning) + self._more("text", piece.content)

    def end(self, completions: Sequence[Completion]) -> bytes:
        whole = reply(self._call, completions)
        found = self._begin(**whole["usage"])
        rest = self._told.rest(completions[0].message)
        for block in whole["content"]:
            match block["type"]:
                case "thinking":
                    found += self._more("thinking", rest.reasoning)
                case "text":
                    found += self._more("text", rest.content) if block["text"] else self._opened("text", text="")
                case _:
                    found += self._opened("tool_use", id=block["id"], name=block["name"], input={})
                    written = bytes(block["input"]).decode()
                    found += self._delta({"type": "input_json_delta", "partial_json": written})
        found += self._closed()
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        found += common.event({"type": "message_delta", "delta": end, "usage": whole["usage"]}, "message_delta")
        return found + common.event({"type": "message_stop"}, "message_stop")

    def _begin(self, *, input_tokens: int = 0, output_tokens: int = 0) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        usage = {"input_tokens": input_tokens, "output_tokens": output_tokens}
        message = {**_head(self._call), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return common.event({"type": "message_start", "message": message}, "message_start")

    def _more(self, kind: Literal["text", "thinking"], text: str) -> bytes:
        """Return the events for more text of a block of `kind`; empty if `text` is empty."""
        if not text:
            return b""
        signature = {"signature": ""} if kind == "thinking" else {}
        opened = b"" if self._open == kind else self._opened(kind, **{kind: ""}, **signature)
        return opened + self._delta({"type": f"{kind}_delta", kind: text})

    def _opened(self, kind: str, **fields: Any) -> bytes:
        """Return the events that close the open block and open another."""
        closed = self._closed()
        self._open = kind
        opened = {"type": "content_block_start", "index": self._blocks, "content_block": {"type": kind, **fields}}
        return closed + common.event(opened, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        told = {"type": "content_block_delta", "index": self._blocks, "delta": delta}
        return common.event(told, "content_block_delta")

    def _closed(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": _SIGNATURE}) if self._open == "thinking" else b""
        closed = common.event({"type": "content_block_stop", "index": self._blocks}, "content_block_stop")
        self._open = ""
        self._blocks += 1
        return signed + closed


def error(status: int, kind: str, message: str) -> dict[str, Any]:
    """Return an error's body."""
    of_anthropic = "invalid_request_error" if kind == TOO_LONG else kind
    return {"type": "error", "error": {"type": of_anthropic, "message": message}}
