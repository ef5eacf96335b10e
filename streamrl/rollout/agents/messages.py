"""What agents ask and are answered, whichever protocol they speak.

`gateway.py` and the protocols translate the bodies of OpenAI's and Anthropic's APIs into a `ChatRequest`, and
`Completion`s back. Nothing here knows of HTTP, tokens of a particular model, or training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool that the policy asks for."""

    id: str
    """Unique in its conversation; the tool's result names it."""
    name: str
    arguments: str
    """A JSON object, as text: as the policy wrote it."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation; two are the same message exactly if they are equal."""

    role: Literal["system", "user", "assistant", "tool"]
    """OpenAI's `developer` is `system`."""
    content: str = ""
    """Its text; that of several text parts, one after another."""
    reasoning: str = ""
    """What the policy thought before `content`, where the model's template tells the two apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls in an assistant's message."""
    tool_call_id: str = ""
    """In a tool's result: the call that it belongs to."""
    tool_name: str = ""
    """In a tool's result: the tool, as `with_tool_names` finds it."""


def with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose tools' results have the names of their tools, for the models that are told them.

    No API's results say the name: it is that of the call that they belong to. A result without its call has none.
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
    """One call of an agent, checked: what it wants the policy to continue, and how."""

    messages: tuple[Message, ...] = ()
    """The conversation; empty where `prompt` is given."""
    tools: tuple[dict[str, Any], ...] = ()
    """In OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue as they stand, without a chat template."""
    given: str = ""
    """Text with which the answer to `messages` begins: the policy goes on from it."""
    n: int = 1
    """How many answers are wanted."""
    max_tokens: int | None = None
    """Most tokens of each answer; None: as many as the run allows."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, which does not include them."""
    stop_token_ids: tuple[int, ...] = ()
    token_texts: bool = False
    """Whether the text of each sampled token is wanted."""


class Completion(msgspec.Struct, frozen=True):
    """One answer to a `ChatRequest`."""

    message: Message
    """What the policy said; `content` is without what was given of the answer, and for a `prompt` the text that
    continues it."""
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...]
    """The tokens that the policy continued."""
    output_ids: tuple[int, ...]
    """The tokens that it sampled, the one that ended the answer included."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token, in nats."""
    token_texts: tuple[str, ...]
    """Each sampled token as text, where that is wanted."""
    matched_stop: str = ""
    """The stop string that ended it, if one did."""


class MessagePiece(msgspec.Struct, frozen=True):
    """More of an answer that is being generated; all pieces of one follow each other in its `Message`."""

    index: int
    """Which of the request's `n` answers."""
    content: str = ""
    reasoning: str = ""
    """Comes before content, except of models that go back to reasoning."""


class Told:
    """What the pieces of one answer have told of it."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""

    def add(self, piece: MessagePiece) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning

    def rest(self, message: Message) -> Message:
        """Return `message` without what has been told of it."""
        return msgspec.structs.replace(
            message,
            content=message.content.removeprefix(self.content),
            reasoning=message.reasoning.removeprefix(self.reasoning),
        )


TOO_LONG = "context_length_exceeded"
"""`RequestRefused.kind` where a conversation leaves no room for an answer. Agents that shorten theirs then know it by
the `code` of OpenAI's error, and by the words of Anthropic's."""


class RequestRefused(Exception):
    """A request that cannot be served; `status` is HTTP's, `kind` the protocols' word for it."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
