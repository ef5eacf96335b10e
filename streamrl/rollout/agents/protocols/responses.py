"""OpenAI's responses: `POST /v1/responses`.

A message of the policy is up to three kinds of items, in this order: its reasoning, its text, its calls of tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from streamrl.rollout.agents.messages import ChatRequest, Completion, Message, RequestRefused, ToolCall
from streamrl.rollout.agents.protocols import common
from streamrl.rollout.agents.protocols.common import Call

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


class _Tool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Format(msgspec.Struct):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Body(common.SamplingFields):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: _Text | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


def parse(raw: bytes) -> Call:
    """Check a request's body."""
    body = common.decode(raw, _Body)
    common.refuse_present(
        {
            "text.format": body.text and body.text.format and body.text.format.type != "text",
            "tool_choice": body.tool_choice not in (None, "auto", "none"),
            "background": body.background,
            "conversation": body.conversation,
            "prompt": body.prompt,
        }
    )
    common.check_counts(1, body.max_output_tokens, "max_output_tokens")
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages = [Message(role="user", content=body.input)] if isinstance(body.input, str) else _messages(body.input)
    if not messages:
        raise RequestRefused("input: there is none")
    return Call(
        request=ChatRequest(
            messages=(*instructions, *messages),
            tools=() if body.tool_choice == "none" else tuple(_tool(tool) for tool in body.tools or ()),
            max_tokens=body.max_output_tokens,
        ),
        model=body.model,
        stream=bool(body.stream),
        logprobs=_LOGPROBS in (body.include or ()),
        top_logprobs=common.check_top_logprobs(body.top_logprobs, "top_logprobs"),
        sampling=body.given(),
        instructions=len(instructions),
        previous=(body.previous_response_id or "").removeprefix("resp_"),
        remembered=body.store is not False,
    )


def _tool(tool: _Tool) -> dict[str, Any]:
    if tool.type != "function" or not tool.name:
        raise RequestRefused(f"tools: only functions with a name are supported, not {tool.type!r}")
    function = msgspec.to_builtins(tool)
    return {"type": function.pop("type"), "function": function}


def _messages(items: Sequence[_Item]) -> list[Message]:
    """Return the messages that `items` are; those of one message of the policy follow each other."""
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


def _output(call: Call, completion: Completion) -> list[dict[str, Any]]:
    said, done = completion.message, {"status": "completed"}
    items: list[dict[str, Any]] = []
    if said.reasoning:
        thought = {"type": "reasoning_text", "text": said.reasoning}
        items.append({"id": f"rs_{call.id}", "type": "reasoning", "summary": [], "content": [thought], **done})
    if said.content or not said.tool_calls:
        text: dict[str, Any] = {"type": "output_text", "text": said.content, "annotations": []}
        if call.logprobs:
            text["logprobs"] = common.token_logprobs(completion, top=call.top_logprobs > 0)
        items.append({"id": f"msg_{call.id}", "type": "message", "role": "assistant", "content": [text], **done})
    for index, tool in enumerate(said.tool_calls):
        named = {"call_id": tool.id, "name": tool.name, "arguments": tool.arguments}
        items.append({"id": f"fc_{call.id}_{index}", "type": "function_call", **named, **done})
    return items


def reply(call: Call, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the answer's body."""
    said = completions[0]
    cut = said.finish_reason == "length"
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "max_output_tokens": call.request.max_tokens,
        "metadata": {},
        "model": call.model,
        "output": _output(call, said),
        "parallel_tool_calls": True,
        "previous_response_id": f"resp_{call.previous}" if call.previous else None,
        "store": call.remembered,
        "temperature": call.sampling.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in call.request.tools],
        "top_p": call.sampling.get("top_p"),
        "usage": {
            "input_tokens": len(said.prompt_ids),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(said.output_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(said.prompt_ids) + len(said.output_ids),
        },
    }


def events(call: Call, completions: Sequence[Completion]) -> Iterator[bytes]:
    """Return the answer as server-sent events."""
    for number, (name, fields) in enumerate(_events(reply(call, completions))):
        yield common.event({"type": name, "sequence_number": number, **fields}, name)


def _events(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the fields of each event."""
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield "response.output_item.added", {**place, "item": {**item, "status": "in_progress", **empty}}
        yield from _inside(item, {"item_id": item["id"], **place})
        yield "response.output_item.done", {**place, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _inside(item: dict[str, Any], place: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
        done = {**place, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
        return
    for index, part in enumerate(item["content"]):
        here = {**place, "content_index": index}
        logprobs = {"logprobs": part.get("logprobs", [])} if part["type"] == "output_text" else {}
        empty = {**part, "text": ""} | ({"logprobs": []} if logprobs else {})
        yield "response.content_part.added", {**here, "part": empty}
        yield f"response.{part['type']}.delta", {**here, "delta": part["text"], **logprobs}
        yield f"response.{part['type']}.done", {**here, "text": part["text"], **logprobs}
        yield "response.content_part.done", {**here, "part": part}
