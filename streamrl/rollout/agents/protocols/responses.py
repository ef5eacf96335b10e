"""OpenAI's responses: `POST /v1/responses`.

A message of the policy becomes up to three kinds of items, in this order: its reasoning, its text, its tool calls.
"""

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

_LOGPROBS = "message.output_text.logprobs"


class _Item(msgspec.Struct):
    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: common.Content = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: common.Content = None


class _ResponseTool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: common.ResponseFormat | None = None


class _ResponseBody(common.SamplingFields):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[_ResponseTool] | None = None
    tool_choice: Any = None
    max_output_tokens: common.TokenCount | None = None
    stream: bool | None = None
    text: _Text | None = None
    include: list[str] | None = None
    top_logprobs: common.TopLogprobs | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


def parse(raw: bytes) -> CheckedRequest:
    """Check a request's body."""
    body = common.decode(raw, _ResponseBody)
    common.refuse_present(
        {
            "text.format": body.text and body.text.format and body.text.format.type != "text",
            "tool_choice": body.tool_choice not in (None, "auto", "none"),
            "background": body.background,
            "conversation": body.conversation,
            "prompt": body.prompt,
        }
    )
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages = [Message(role="user", content=body.input)] if isinstance(body.input, str) else _messages(body.input)
    if not messages:
        raise RequestRefused("input: there is none")
    return CheckedRequest(
        request=ChatRequest(
            messages=(*instructions, *messages),
            tools=() if body.tool_choice == "none" else tuple(_tool(tool) for tool in body.tools or ()),
            max_tokens=body.max_output_tokens,
            token_texts=_LOGPROBS in (body.include or ()),
        ),
        model=body.model,
        events=ResponseEvents if body.stream else None,
        logprobs=_LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs or 0,
        sampling=body.given(),
        instructions=len(instructions),
        previous=(body.previous_response_id or "").removeprefix("resp_"),
        remembered=body.store is not False,
    )


def _tool(tool: _ResponseTool) -> dict[str, Any]:
    if tool.type != "function" or not tool.name:
        raise RequestRefused(f"tools: only functions with a name are supported, not {tool.type!r}")
    function = msgspec.to_builtins(tool)
    return {"type": function.pop("type"), "function": function}


def _messages(items: Sequence[_Item]) -> list[Message]:
    """Return the messages in `items`; consecutive items of one message of the policy are merged."""
    messages: list[Message] = []
    reasoning = ""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "reasoning":
            reasoning += common.text_of(item.content, where)
            continue
        match item.type:
            case "message":
                messages.append(_message(item, reasoning, where))
            case "function_call":
                if reasoning or not messages or messages[-1].role != "assistant":
                    messages.append(Message(role="assistant", reasoning=reasoning))
                call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
                messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
            case "function_call_output":
                output = common.text_of(item.output, where)
                messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
            case other:
                raise RequestRefused(f"{where}: items of type {other!r} are not supported")
        reasoning = ""
    return messages


def _message(item: _Item, reasoning: str, where: str) -> Message:
    content = common.text_of(item.content, where)
    match item.role:
        case None:
            raise RequestRefused(f"{where}.role: missing")
        case "assistant":
            return Message(role="assistant", content=content, reasoning=reasoning)
        case "developer":
            return Message(role="system", content=content)
        case role:
            return Message(role=role, content=content)


_DONE = {"status": "completed"}


def _reasoning(call: CheckedRequest, thought: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": thought}]
    return {"id": f"rs_{call.id}", "type": "reasoning", "summary": [], "content": content, **_DONE}


def _message_item(call: CheckedRequest, said: str, logprobs: list[dict[str, Any]] | None) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "output_text", "text": said, "annotations": []}
    if logprobs is not None:
        text["logprobs"] = logprobs
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "content": [text], **_DONE}


def _output(call: CheckedRequest, completion: Completion) -> list[dict[str, Any]]:
    said = completion.message
    items: list[dict[str, Any]] = []
    if said.reasoning:
        items.append(_reasoning(call, said.reasoning))
    if said.content or not said.tool_calls:
        logprobs = common.token_logprobs(completion, top=call.top_logprobs > 0) if call.logprobs else None
        items.append(_message_item(call, said.content, logprobs))
    for index, tool in enumerate(said.tool_calls):
        named = {"call_id": tool.id, "name": tool.name, "arguments": tool.arguments}
        items.append({"id": f"fc_{call.id}_{index}", "type": "function_call", **named, **_DONE})
    return items


def reply(call: CheckedRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answer's body."""
    said = completions[0]
    cut = said.finish_reason == "length"
    return {
        **_head(call),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(call, said),
        "usage": {
            "input_tokens": len(said.prompt_ids),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(said.output_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(said.prompt_ids) + len(said.output_ids),
        },
    }


def _head(call: CheckedRequest) -> dict[str, Any]:
    """Return the fields of a response that are known before the answer."""
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created,
        "error": None,
        "instructions": None,
        "max_output_tokens": call.request.max_tokens,
        "metadata": {},
        "model": call.model,
        "parallel_tool_calls": True,
        "previous_response_id": f"resp_{call.previous}" if call.previous else None,
        "store": call.remembered,
        "temperature": call.sampling.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in call.request.tools],
        "top_p": call.sampling.get("top_p"),
    }


def _logprobs_of(part: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probability fields for events of `part`: a list, perhaps empty, for text, else no field."""
    return {"logprobs": part.get("logprobs", [])} if part["type"] == "output_text" else {}


class ResponseEvents:
    """An answer as server-sent events. An item of text or reasoning stays open while more of it may arrive."""

    def __init__(self, call: CheckedRequest) -> None:
        self._call = call
        self._number = 0
        self._items = 0
        self._item_id = ""
        """Id of the latest item; its number is `_items`."""
        self._begun = False
        self._told = StreamedAnswer()
        self._open = ""
        """The type of the open item; empty if none is open."""

    def piece(self, piece: MessagePiece) -> bytes:
        self._told.add(piece)
        found = self._begin()
        if piece.reasoning and self._open != "message":  # later reasoning is only in the whole answer at the end
            found += self._more(_reasoning(self._call, ""), piece.reasoning)
        if piece.content:
            if self._open == "reasoning":
                found += self._closed(_reasoning(self._call, self._told.reasoning))
            found += self._more(_message_item(self._call, "", None), piece.content)
        return found

    def end(self, completions: Sequence[Completion]) -> bytes:
        whole = reply(self._call, completions)
        rest = self._told.rest(completions[0].message)
        found = self._begin()
        for item in whole["output"]:
            if item["type"] == self._open:
                if more := rest.reasoning if self._open == "reasoning" else rest.content:
                    found += self._more(item, more)
                found += self._closed(item)
            elif item["type"] == "function_call":
                found += self._function_call(item)
            elif item["type"] == "message" or not (self._told.reasoning or self._open):
                found += self._more(item, item["content"][0]["text"]) + self._closed(item)
        return found + self._event(f"response.{whole['status']}", response=whole)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        begun = {**_head(self._call), "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _more(self, item: dict[str, Any], text: str) -> bytes:
        """Return the events for more text of `item`, after those that open it if it is not open."""
        (part,) = item["content"]
        found = b""
        if self._open != item["type"]:
            self._open = item["type"]
            found = self._item_added(item) + self._part_added(part)
        return found + self._event(f"response.{part['type']}.delta", **self._place(), delta=text, **_logprobs_of(part))

    def _closed(self, item: dict[str, Any]) -> bytes:
        self._open = ""
        (part,) = item["content"]
        return self._part_done(part) + self._item_done(item)

    def _function_call(self, item: dict[str, Any]) -> bytes:
        found = self._item_added(item)
        place = {"item_id": item["id"], "output_index": self._items}
        done = {**place, "name": item["name"], "arguments": item["arguments"]}
        found += self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        found += self._event("response.function_call_arguments.done", **done)
        return found + self._item_done(item)

    def _item_added(self, item: dict[str, Any]) -> bytes:
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        self._item_id = item["id"]
        begun = {**item, "status": "in_progress", **empty}
        return self._event("response.output_item.added", output_index=self._items, item=begun)

    def _item_done(self, item: dict[str, Any]) -> bytes:
        done = self._event("response.output_item.done", output_index=self._items, item=item)
        self._items += 1
        return done

    def _part_added(self, part: dict[str, Any]) -> bytes:
        empty = {**part, "text": ""} | ({"logprobs": []} if part["type"] == "output_text" else {})
        return self._event("response.content_part.added", **self._place(), part=empty)

    def _part_done(self, part: dict[str, Any]) -> bytes:
        place = self._place()
        return self._event(
            f"response.{part['type']}.done", **place, text=part["text"], **_logprobs_of(part)
        ) + self._event("response.content_part.done", **place, part=part)

    def _place(self) -> dict[str, Any]:
        """Return the fields that locate an event's part: items here have one part."""
        return {"item_id": self._item_id, "output_index": self._items, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = common.event({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return event
