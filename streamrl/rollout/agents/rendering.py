"""Conversations with tools to tokens, and sampled tokens back to messages.

`Renderer` is what an episode asks for. `TemplateRenderer` does it with the checkpoint's own chat template, for every
model: a further turn is what the template writes between the end of an answer and the beginning of the next one, found
once with a mark in place of the answer, so that its cost does not grow with the conversation.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from streamrl.errors import DataError
from streamrl.rollout.agents.messages import Message, RequestRefused, ToolCall
from streamrl.rollout.chat import ChatTokenizer

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""How Qwen, Hermes and others write the call of a tool."""
_REASONING = re.compile(r"\A\s*<think>(.*?)</think>", re.DOTALL)


class Renderer(Protocol):
    """Translates between the messages of an agent and the tokens of a model."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation up to where the model answers; raises `RequestRefused`."""

    def extend(
        self, output_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """Return the tokens to append after the sampled `output_ids` so that the model answers `messages`.

        Raises `RequestRefused`.
        """

    def parse(self, output_ids: Sequence[int], *, matched_stop: str, tools: Sequence[dict[str, Any]]) -> Message:
        """Return what the model said, without the stop string that ended it."""


class TemplateRenderer:
    """A `Renderer` that knows no more than the checkpoint's chat template."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        try:
            return self._chat.render(_to_template(messages), tools)
        except DataError as error:
            raise RequestRefused(str(error)) from error

    def extend(
        self, output_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        try:
            return self._chat.next_turn(output_ids, _to_template(messages), tools)
        except DataError as error:
            raise RequestRefused(str(error)) from error

    def parse(self, output_ids: Sequence[int], *, matched_stop: str, tools: Sequence[dict[str, Any]]) -> Message:
        text = self._chat.decode(output_ids)
        if matched_stop:
            before, stop, _ = text.rpartition(matched_stop)
            text = before if stop else text
        return parse_text(text, tools=tools)


def parse_text(text: str, *, tools: Sequence[dict[str, Any]]) -> Message:
    """Return the message that `text` of a model is: what it thought, what it said, which tools it calls.

    A call that is not valid JSON, or names no tool that there is, stays in the text for the agent to judge.
    """
    reasoning = ""
    if found := _REASONING.match(text):
        reasoning, text = found.group(1).strip(), text[found.end() :]
    if not tools:
        return Message(role="assistant", content=text, reasoning=reasoning)
    names = {tool["function"]["name"] for tool in tools}
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _tool_call(match.group(1), names)
        if call is None:
            return match.group(0)
        calls.append(call)
        return ""

    content = _TOOL_CALL.sub(take, text)
    return Message(
        role="assistant", content=content.strip() if calls else content, reasoning=reasoning, tool_calls=tuple(calls)
    )


def _tool_call(text: str, names: set[str]) -> ToolCall | None:
    try:
        call = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(call, dict) or call.get("name") not in names or not isinstance(call.get("arguments"), dict):
        return None
    arguments = msgspec.json.encode(call["arguments"]).decode()
    return ToolCall(id=f"call_{uuid.uuid4().hex[:16]}", name=call["name"], arguments=arguments)


def _to_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return `messages` in the form that chat templates of Hugging Face checkpoints read."""
    return [_fields(message) for message in messages]


def _fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _arguments(text: str) -> Any:
    """Templates write arguments with `tojson`, so they take the object, not its text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
