"""Shared parts of the protocols: checked requests, text parts, events, and refusals by name."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from streamrl.errors import UNDECODABLE
from streamrl.rollout.agents.messages import TOO_LONG, ChatRequest, Completion, Message, MessagePiece, RequestRefused


class CheckedRequest(msgspec.Struct, frozen=True):
    """A request that a protocol has checked, with the settings that determine the form of its answer."""

    request: ChatRequest
    model: str
    events: Callable[[CheckedRequest], EventStream] | None = None
    """Writer of the answer as server-sent events; None: the answer is sent as one body."""
    logprobs: bool = False
    stream_usage: bool = False
    top_logprobs: int = 0
    """Number of likeliest tokens requested at each position."""
    sampling: dict[str, Any] = {}
    """The requested sampling: its values of `temperature`, `top_p`, `top_k`, `min_p`, and of unsupported settings such
    as `seed`."""
    instructions: int = 0
    """Number of first messages that do not carry over to a call that continues this one."""
    previous: str = ""
    """The id of the call whose conversation this one continues."""
    remembered: bool = False
    """Whether a later call may continue this one's conversation."""
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = msgspec.field(default_factory=lambda: int(time.time()))


class EventStream(Protocol):
    """Server-sent events of one answer, while it is generated."""

    def piece(self, piece: MessagePiece) -> bytes:
        """Return the events for a further piece of the answer."""

    def end(self, completions: Sequence[Completion]) -> bytes:
        """Return the events for the rest of the answer, or for all of it if there was no piece."""


class Api(Protocol):
    """One API for agents; each of the other modules here implements one."""

    def parse(self, raw: bytes) -> CheckedRequest:
        """Check a request's body; raises `RequestRefused`."""

    def reply(self, call: CheckedRequest, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer's body."""

    def error(self, status: int, kind: str, message: str) -> dict[str, Any]:
        """Return an error's body."""


class ContentPart(msgspec.Struct):
    """A part of a message's content."""

    type: str = "text"
    text: str = ""


class ResponseFormat(msgspec.Struct):
    """The form that a response must have."""

    type: str = "text"


class _UnsupportedFields(msgspec.Struct, kw_only=True):
    """Further fields of OpenAI and of servers of open models that are refused: the policy's probabilities or input
    would depend on them."""

    response_format: ResponseFormat | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    use_beam_search: bool | None = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    documents: Any = None
    thinking_token_budget: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


class SamplingFields(_UnsupportedFields, kw_only=True):
    """The sampling settings that a request may have."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    reasoning_effort: Any = None
    reasoning: Any = None
    thinking: Any = None
    parallel_tool_calls: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the sampling settings that the request has; raises `RequestRefused` for unsupported ones."""
        others = {name: getattr(self, name) for name in _UnsupportedFields.__struct_fields__}
        others["repetition_penalty"] = self.repetition_penalty not in (None, 1)
        others["response_format"] = self.response_format is not None and self.response_format.type != "text"
        refuse_present(others)
        own = {name: getattr(self, name) for name in SamplingFields.__struct_fields__ if name not in others}
        if self.parallel_tool_calls:  # true is the default anyway
            del own["parallel_tool_calls"]
        return {name: value for name, value in own.items() if value is not None}


Content = str | list[ContentPart] | None
TokenId = Annotated[int, msgspec.Meta(ge=0)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
Samples = Annotated[int, msgspec.Meta(ge=1, le=256)]
"""Number of completions of one request."""
TokenCount = Annotated[int, msgspec.Meta(ge=1)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
"""Number of likeliest tokens requested at each position."""
Body = TypeVar("Body")


def decode(body: bytes, kind: type[Body]) -> Body:
    """Return `body` as a `kind`; raises `RequestRefused` with the name of the wrong field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise RequestRefused(f"the request's body cannot be read: {error}") from None


def text_of(content: Content, where: str) -> str:
    """Return the text of `content`; raises `RequestRefused` for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "reasoning_text"):
            raise RequestRefused(f"{where}: content of type {part.type!r} is not supported, only text")
    return "".join(part.text for part in content)


def split_given(messages: Sequence[Message], where: str) -> tuple[tuple[Message, ...], str]:
    """Return a conversation without its last message, and the text of that message, which the policy continues.

    Raises `RequestRefused`, which names `where` the message is, unless it is an assistant's text, without surrounding
    white space, after other messages.
    """
    *before, last = messages
    if last.role != "assistant" or last.tool_calls or last.reasoning or not before:
        raise RequestRefused(f"{where}: the policy can only continue the text of an assistant, after other messages")
    if last.content != last.content.strip():
        raise RequestRefused(f"{where}: the text to continue must not begin or end with white space")
    return tuple(before), last.content


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings; raises `RequestRefused` for empty ones."""
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in found:
        raise RequestRefused("stop: an empty string cannot end an answer")
    return found


def refuse_present(fields: Mapping[str, Any]) -> None:
    """Raise `RequestRefused` for the first field that is set."""
    for name, value in fields.items():
        if value:
            why = "it changes the policy's probabilities or its input"
            raise RequestRefused(f"{name}: not supported, because {why}; leave it out")


def usage(completions: Sequence[Completion]) -> dict[str, int]:
    """Return the token counts under OpenAI's names."""
    prompt = len(completions[0].prompt_ids) if completions else 0
    output = sum(len(completion.output_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def token_logprobs(completion: Completion, *, top: bool) -> list[dict[str, Any]]:
    """Return the log-probability of each sampled token; with `top`, also as its only entry in `top_logprobs`."""
    tokens = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}
        for text, logprob in zip(completion.token_texts, completion.logprobs, strict=True)
    ]
    return [{**token, "top_logprobs": [token] if top else []} for token in tokens]


def event(data: Any, name: str = "") -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def openai_error(status: int, kind: str, message: str) -> dict[str, Any]:
    """Return an error's body in OpenAI's format."""
    if kind == TOO_LONG:
        return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": kind}}
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
