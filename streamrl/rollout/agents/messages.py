"""The requests of agents and their answers, independent of the API.

`gateway.py` and the protocols translate the bodies of OpenAI's and Anthropic's APIs into a `ChatRequest`, and
`Completion`s back. This module is independent of HTTP, of the tokens of a particular model, and of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from streamrl.errors import UNDECODABLE

FinishReason = Literal["stop", "length", "tool_calls"]


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call that the policy makes."""

    id: str
    """Unique in its conversation; the tool's result names it."""
    name: str
    arguments: str
    """A JSON object as text, exactly as the policy wrote it."""

    @property
    def parsed(self) -> Any:
        """The arguments as an object if they are JSON, else their text."""
        try:
            return msgspec.json.decode(self.arguments)
        except UNDECODABLE:
            return self.arguments


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation. Two messages are the same exactly if they are equal."""

    role: Literal["system", "user", "assistant", "tool"]
    """OpenAI's `developer` is mapped to `system`."""
    content: str = ""
    """Text of the message; several text parts are concatenated."""
    reasoning: str = ""
    """The policy's reasoning before `content`, if the model's template separates the two."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls in an assistant message."""
    tool_call_id: str = ""
    """In a tool result: the id of its call."""
    tool_name: str = ""
    """In a tool result: the name of the tool, as `with_tool_names` finds it."""


def with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose tool results have the names of their tools, for chat templates that show them.

    Tool results have no name in any of the APIs: it comes from the call to which they belong. A result without its call
    has no name.
    """
    names: dict[str, str] = {}
    found = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool":
            message = msgspec.structs.replace(message, tool_name=names.get(message.tool_call_id, ""))
        found.append(message)
    return found


class ChatRequest(msgspec.Struct, frozen=True):
    """One checked request of an agent: the input that the policy continues, and how."""

    messages: tuple[Message, ...] = ()
    """The conversation; empty if `prompt` is given."""
    tools: tuple[dict[str, Any], ...] = ()
    """In OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue unchanged, without a chat template."""
    given: str = ""
    """Text with which the answer to `messages` begins; the policy continues it."""
    n: int = 1
    """Number of answers requested."""
    max_tokens: int | None = None
    """Most tokens of each answer; None: as many as the run allows."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    token_texts: bool = False
    """Whether the text of each sampled token is requested."""


class Completion(msgspec.Struct, frozen=True):
    """One answer to a `ChatRequest`."""

    message: Message
    """The policy's message. `content` excludes the given beginning of the answer; for a `prompt` it is the
    continuation."""
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...]
    """The tokens that the policy continued."""
    output_ids: tuple[int, ...]
    """The tokens that the policy sampled, including the one that ended the answer."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token, in nats."""
    token_texts: tuple[str, ...]
    """Each sampled token as text, if requested."""
    matched_stop: str = ""
    """The stop string that ended the answer, if there was one."""


class MessagePiece(msgspec.Struct, frozen=True):
    """The next piece of an answer that is being generated; all pieces of an answer together make up its `Message`."""

    index: int
    """Index of the answer among the request's `n`."""
    content: str = ""
    reasoning: str = ""
    """Precedes `content`, unless the model returns to reasoning."""


class StreamedAnswer:
    """The part of one answer that its pieces have already sent."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""

    def add(self, piece: MessagePiece) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning

    def rest(self, message: Message) -> Message:
        """Return `message` without the part that has been sent."""
        return msgspec.structs.replace(
            message,
            content=message.content.removeprefix(self.content),
            reasoning=message.reasoning.removeprefix(self.reasoning),
        )


TOO_LONG = "context_length_exceeded"
"""`RequestRefused.kind` if a conversation leaves no room for an answer. Agents that shorten their conversations
recognise it by the `code` of OpenAI's error, and by the wording of Anthropic's."""


class RequestRefused(Exception):
    """A request that cannot be served; `status` is the HTTP status, `kind` the error type in the APIs."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
