"""Conversations with tools to tokens, and sampled tokens back to messages.

`Renderer` is what an episode asks for. `TemplateRenderer` does it with the checkpoint's own chat template, for every
model: a further turn is what the template writes between the end of an answer and the beginning of the next one, found
with a mark in place of the answer, so that its cost does not grow with the conversation. A template may also write
earlier turns anew, most often to leave their reasoning out: that is tried once, and there nothing is extended.
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
"""How Qwen, Hermes and others write the call of a tool."""
_OPENING_TOKENS = 16
"""How many of a prompt's last tokens are searched for the beginning of the reasoning, which a template may add."""
THINK, THINK_END = "<think>", "</think>"
_REASONING = re.compile(r"\A\s*<think>(.*?)(?:</think>\s*|\Z)", re.DOTALL)
"""Reasoning that was not ended is reasoning."""


class SampledTokens(NamedTuple):
    """An answer in tokens, or the beginning of one."""

    prompt_ids: Sequence[int]
    """What the model continued."""
    output_ids: Sequence[int]
    """What it sampled."""
    tools: Sequence[dict[str, Any]] = ()
    """What it may call."""


class Renderer(Protocol):
    """Translates between the messages of an agent and the tokens of a model."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation up to where the model answers; raises `RequestRefused`."""

    def extend(self, sampled: SampledTokens, messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens to append after prompt and answer so that the model answers `messages`. None: the model's
        template writes what was before them in another way now, or has no form for them alone.

        Raises `RequestRefused`.
        """

    def parse(self, sampled: SampledTokens, *, matched_stop: str) -> Message:
        """Return what the model said, without the stop string that ended it."""

    def certain(self, sampled: SampledTokens, *, stops: Sequence[str]) -> Message:
        """Return the beginning of what `parse` will return, whatever tokens are still to come; it may be empty.

        `stops`: the strings of which one may end the answer.
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
"""Short conversations to try a template with: (whether the assistant reasons, role of what follows) → both messages."""


class TemplateRenderer:
    """A `Renderer` that knows no more than the checkpoint's chat template."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._anew = {case for case, (answer, further) in _FURTHER.items() if not self._stable(answer, further)}
        """The cases in which the template writes earlier turns anew."""

    @property
    def stability(self) -> str:
        """What was found out about it, for the log."""
        if not self._anew:
            return "it leaves earlier turns as they were"
        speaker = {"user": "a user", "tool": "a tool's result"}
        cases = ", ".join(
            f"{speaker[role]} after an answer {'with' if thought else 'without'} reasoning"
            for thought, role in sorted(self._anew)
        )
        return f"it writes earlier turns anew, and such a turn may begin a conversation of its own: {cases}"

    def _stable(self, answer: Message, further: Message) -> bool:
        """Whether the template leaves a question and an `answer` as they were when `further` follows.

        As the answer was, reasoning included, if it was written by the template; without reasoning also as it was
        said, for some templates put empty reasoning before the last answer. What the template refuses, it will refuse
        later, too: that is no instability.
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
        except DataError:  # it may refuse them only without what was before them, such as a result without its call
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
        """Return the tag of reasoning that the template has opened for the model, if it has."""
        return THINK if self._chat.decode(prompt_ids[-_OPENING_TOKENS:]).rstrip().endswith(THINK) else ""


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


def certain_text(opening: str, text: str, *, stops: Sequence[str], tools: Sequence[dict[str, Any]]) -> Message:
    """Return the beginning of what `parse_text` will make of `opening` and `text`, of which more is to come.

    Kept back is whatever may turn out to be something else: half a character, a stop string, a tag of reasoning, a
    tool's call, and white space, which goes where reasoning ends or a tool is called.
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
    """Return `text`, of which more is to come, without half a character and what may be one of `stops` at its end."""
    return without_begun(up_to_stop(text.rstrip("\ufffd"), stops), *stops)


def up_to_stop(text: str, stops: Sequence[str]) -> str:
    """Return what is before the first of `stops` in `text`."""
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
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_name:
        fields["name"] = message.tool_name
    return fields


def _arguments(text: str) -> Any:
    """Templates write arguments with `tojson`, so they take the object, not its text."""
    try:
        return msgspec.json.decode(text)
    except UNDECODABLE:
        return text
