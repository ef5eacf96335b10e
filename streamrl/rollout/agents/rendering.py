"""Conversations with tools to tokens, and sampled tokens back to messages.

`Renderer` is the interface for episodes. `TemplateRenderer` implements it for every model with the checkpoint's own
chat template. To extend a conversation, it uses the template's tokens between the end of an answer and the beginning of
the next one. It finds them with a mark in place of the answer, so that the cost does not grow with the conversation.
Some templates render earlier turns differently in a longer conversation, most often to leave out their reasoning.
`TemplateRenderer` tests for this once, and does not extend conversations in these cases.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from streamrl.errors import UNDECODABLE, ConfigError, DataError
from streamrl.rollout.agents.messages import Message, RequestRefused, ToolCall
from streamrl.rollout.chat import ChatTokenizer
from streamrl.stop_strings import before_stop, without_begun

_TOOL_CALL_TAG = "<tool_call>"
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""Format of tool calls in Qwen, Hermes and others."""
_OPENING_TOKENS = 16
"""Number of tokens at the end of a prompt that are searched for an opening reasoning tag, which a template may add."""
THINK, THINK_END = "<think>", "</think>"
_REASONING = re.compile(r"\A\s*<think>(.*?)(?:</think>\s*|\Z)", re.DOTALL)
"""Reasoning without an end tag is reasoning, too."""


class SampledTokens(NamedTuple):
    """An answer in tokens, or the beginning of one."""

    prompt_ids: Sequence[int]
    """The tokens that the model continued."""
    output_ids: Sequence[int]
    """The tokens that the model sampled."""
    tools: Sequence[dict[str, Any]] = ()
    """The tools that the model may call."""


class Renderer(Protocol):
    """Translates between the messages of an agent and the tokens of a model."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation up to the model's next answer; raises `RequestRefused`."""

    def extend(self, sampled: SampledTokens, messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens to append after prompt and answer so that the model answers `messages`. Return None if the
        model's template now renders the earlier turns differently, or cannot render `messages` alone.

        Raises `RequestRefused`.
        """

    def parse(self, sampled: SampledTokens, *, matched_stop: str) -> Message:
        """Return the model's message, without the stop string that ended it."""

    def certain(self, sampled: SampledTokens, *, stops: Sequence[str]) -> Message:
        """Return the part of `parse`'s later result that further tokens cannot change; it may be empty.

        `stops`: strings that may end the answer.
        """


_QUESTION = Message("user", "?")
_CALL = ToolCall("call_1", "look", "{}")
_RESULT = Message("tool", "ok", tool_call_id="call_1", tool_name="look")
_TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
_FURTHER: dict[tuple[bool, str], tuple[Message, Message]] = {
    (False, "user"): (Message("assistant", "!"), _QUESTION),
    (True, "user"): (Message("assistant", "!", reasoning="hm"), _QUESTION),
    (False, "tool"): (Message("assistant", "!", tool_calls=(_CALL,)), _RESULT),
    (True, "tool"): (Message("assistant", "!", reasoning="hm", tool_calls=(_CALL,)), _RESULT),
}
"""Short conversations that test a template: (whether the assistant reasons, role of the next message) → both messages.
"""


class TemplateRenderer:
    """A `Renderer` that uses only the checkpoint's chat template."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._anew = {case for case, (answer, further) in _FURTHER.items() if not self._stable(answer, further)}
        """The cases in which the template renders earlier turns differently."""

    @property
    def stable(self) -> bool:
        """Whether the template leaves earlier turns as they were in all tested cases."""
        return not self._anew

    @property
    def stability(self) -> str:
        """Result of the template's tests, for the log."""
        if not self._anew:
            return "it leaves earlier turns as they were"
        speaker = {"user": "a user", "tool": "a tool's result"}
        cases = ", ".join(
            f"{speaker[role]} after an answer {'with' if thought else 'without'} reasoning"
            for thought, role in sorted(self._anew)
        )
        return f"it changes earlier turns, and such a turn may begin a conversation of its own: {cases}"

    def _stable(self, answer: Message, further: Message) -> bool:
        """Return whether the template leaves a question and an `answer` unchanged when `further` follows.

        The answer may be as the template rendered it, with its reasoning. An answer without reasoning may also be as
        the model sampled it, since some templates put empty reasoning before the last answer. A conversation that the
        template refuses counts as stable: it is also refused later.
        """
        tools = [_TOOL] if answer.tool_calls else []
        try:
            asked = self._chat.render_text(to_template([_QUESTION]), tools)
            before = self._chat.render_text(to_template([_QUESTION, answer]), tools, answering=False)
            after = self._chat.render_text(to_template([_QUESTION, answer, further]), tools)
        except DataError:
            return True
        return after.startswith(before) or (not answer.reasoning and after.startswith(asked + answer.content))

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        try:
            return self._chat.render(to_template(messages), tools)
        except DataError as error:
            raise RequestRefused(str(error)) from error

    def extend(self, sampled: SampledTokens, messages: Sequence[Message]) -> list[int] | None:
        if self._anew:
            thought = THINK_END in self._chat.decode(sampled.output_ids)
            if any((thought, message.role) in self._anew for message in messages):
                return None
        try:
            return self._chat.next_turn(sampled.output_ids, to_template(messages), sampled.tools)
        except DataError:  # some templates refuse, for example, a tool result without its call
            return None
        except ConfigError as error:
            raise RequestRefused(str(error)) from error

    def parse(self, sampled: SampledTokens, *, matched_stop: str) -> Message:
        text = before_stop(self._chat.decode(sampled.output_ids), matched_stop)
        return parse_text(self._opening(sampled.prompt_ids) + text, tools=sampled.tools)

    def certain(self, sampled: SampledTokens, *, stops: Sequence[str]) -> Message:
        text = self._chat.decode(sampled.output_ids)
        return certain_text(self._opening(sampled.prompt_ids), text, stops=stops, tools=sampled.tools)

    def _opening(self, prompt_ids: Sequence[int]) -> str:
        """Return the reasoning tag that the template has opened for the model, or an empty string."""
        return THINK if self._chat.decode(prompt_ids[-_OPENING_TOKENS:]).rstrip().endswith(THINK) else ""


def parse_text(text: str, *, tools: Sequence[dict[str, Any]]) -> Message:
    """Return the message in `text` of a model: its reasoning, its content and its tool calls.

    A tool call that is not valid JSON, or names an unknown tool, stays in the text for the agent to judge.
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


def certain_text(opening: str, text: str, *, stops: Sequence[str], tools: Sequence[dict[str, Any]]) -> Message:
    """Return the certain beginning of `parse_text`'s result for `opening` and `text`, while more text is to come.

    It leaves out every end that may become something else: half a character, a stop string, a reasoning tag, a tool
    call, and white space, which is removed where reasoning ends or a tool is called.
    """
    text = opening + settled(text, stops)
    begun = text.lstrip()
    if THINK.startswith(begun):
        return Message("assistant")
    reasoning = ""
    if begun.startswith(THINK):
        thought, ended, text = begun.removeprefix(THINK).partition(THINK_END)
        if not ended:
            return Message("assistant", reasoning=without_begun(thought, THINK_END).strip())
        reasoning, text = thought.strip(), text.lstrip()
    if tools:
        text = without_begun(text.partition(_TOOL_CALL_TAG)[0], _TOOL_CALL_TAG).rstrip()
        if text[:1].isspace():
            text = ""
    return Message("assistant", text, reasoning)


def settled(text: str, stops: Sequence[str]) -> str:
    """Return an unfinished `text` without half a character or a possible beginning of one of `stops` at its end."""
    return without_begun(up_to_stop(text.rstrip("\ufffd"), stops), *stops)


def up_to_stop(text: str, stops: Sequence[str]) -> str:
    """Return `text` before the first of `stops` in it."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def _tool_call(text: str, names: set[str]) -> ToolCall | None:
    try:
        call = msgspec.json.decode(text)
    except UNDECODABLE:
        return None
    if not isinstance(call, dict) or call.get("name") not in names or not isinstance(call.get("arguments"), dict):
        return None
    arguments = msgspec.json.encode(call["arguments"]).decode()
    return ToolCall(id=f"call_{uuid.uuid4().hex[:16]}", name=call["name"], arguments=arguments)


def to_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
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
                "function": {"name": call.name, "arguments": call.parsed},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_name:
        fields["name"] = message.tool_name
    return fields
