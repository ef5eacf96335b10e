"""`ModelRenderer`: conversations for models that the `renderers` package supports; `renderer_of` chooses a renderer.

A renderer of the package is chosen only if it produces the same tokens as the checkpoint's own chat template in a few
conversations with tools, results, system messages and reasoning. So a fine-tuned model is recognised by its template,
not by its name, and a modified template is not mistaken for its original.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.errors import ConfigError, StreamRLError
from streamrl.rollout.agents.messages import Message, RequestRefused, ToolCall
from streamrl.rollout.agents.renderer_names import AUTO, TEMPLATE, known_renderers
from streamrl.rollout.agents.rendering import (
    Renderer,
    SampledTokens,
    TemplateRenderer,
    settled,
    to_template,
    up_to_stop,
)
from streamrl.rollout.chat import ChatTokenizer
from streamrl.stop_strings import before_stop

log = logging.getLogger(__name__)

WHOLE_ANSWERS = {"gemma4", "gpt-oss", "inkling", "llama-3"}
"""Renderers whose parse of a partial answer may change with later tokens: these may turn its text into a header,
another channel or a tool call."""

_BEGUN_TAG = re.compile(r"<[^<>\s]*\Z")
"""A possible beginning of a tag at the end of a text."""

_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
_ASKED = Message("user", "What is 2 + 2?")
_CALL = ToolCall("call_1", "add", '{"a": 2, "b": 2}')
_CALLED = Message("assistant", "", tool_calls=(_CALL,))
_RESULT = Message("tool", "4", tool_call_id="call_1", tool_name="add")
_SYSTEM = Message("system", "Be brief.")
_PROBES: list[tuple[list[Message], list[dict[str, Any]]]] = [
    ([_ASKED], []),
    ([_SYSTEM, _ASKED], []),
    ([_ASKED, Message("assistant", "4"), Message("user", "Sure? é\n")], []),
    ([_ASKED, Message("assistant", "4", reasoning="Two and two."), Message("user", "Sure?")], []),
    ([_ASKED], _TOOLS),
    ([_SYSTEM, _ASKED, _CALLED, _RESULT], _TOOLS),
    ([_ASKED, Message("assistant", "I add.", reasoning="A sum.", tool_calls=(_CALL,)), _RESULT, _RESULT], _TOOLS),
]
"""Test conversations in which a renderer must produce the same tokens as the chat template."""


class ModelRenderer:
    """A `Renderer` that uses a renderer of the `renderers` package."""

    def __init__(self, renderer: Any, chat: ChatTokenizer, *, kind: str) -> None:
        """`kind`: the name of `renderer`."""
        self.kind = kind
        self._renderer = renderer
        self._chat = chat

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        try:
            return list(
                self._renderer.render_ids(to_template(messages), tools=list(tools) or None, add_generation_prompt=True)
            )
        except (ValueError, KeyError, TypeError) as error:  # raised for messages that the model has no form for
            roles = ", ".join(message.role for message in messages)
            raise RequestRefused(f"the model has no form for a conversation of {roles}: {error}") from error

    def extend(self, sampled: SampledTokens, messages: Sequence[Message]) -> list[int] | None:
        prompt_ids, output_ids, tools = map(list, sampled)
        further = to_template(messages)
        extended = self._renderer.bridge_to_next_turn(prompt_ids, output_ids, further, tools=tools or None)
        said = [*prompt_ids, *output_ids]
        if extended is None or extended.token_ids[: len(said)] != said:
            return None
        return list(extended.token_ids[len(said) :])

    def parse(self, sampled: SampledTokens, *, matched_stop: str) -> Message:
        said = self._read(sampled)
        names = {tool["function"]["name"] for tool in sampled.tools}
        calls: list[ToolCall] = []
        no_calls: list[str] = []
        for found in said.tool_calls:
            if found.status == "ok" and found.name in names and isinstance(found.arguments, dict):
                arguments = msgspec.json.encode(found.arguments).decode()
                calls.append(ToolCall(found.id or f"call_{uuid.uuid4().hex[:16]}", found.name, arguments))
            else:  # it stays in the text, for the agent to judge
                span = found.token_span
                no_calls.append(found.raw if span is None else self._chat.decode(sampled.output_ids[slice(*span)]))
        content = "\n".join(filter(None, [said.content.lstrip(), *no_calls]))
        return Message(
            role="assistant",
            content=before_stop(content, matched_stop),
            reasoning=before_stop(said.reasoning_content or "", matched_stop).strip(),
            tool_calls=tuple(calls),
        )

    def certain(self, sampled: SampledTokens, *, stops: Sequence[str]) -> Message:
        if self.kind in WHOLE_ANSWERS:
            return Message("assistant")
        said = self._read(sampled)
        reasoning = said.reasoning_content or ""
        if not said.reasoning_complete:
            return Message("assistant", reasoning=_BEGUN_TAG.sub("", settled(reasoning, stops)).strip())
        content = _BEGUN_TAG.sub("", settled(said.content, stops)).strip()
        if not reasoning and not self._chat.decode(sampled.output_ids[:1]):
            content = ""  # the model may still repeat the beginning of its turn, and then reason
        return Message("assistant", content, up_to_stop(reasoning, stops).strip())

    def _read(self, sampled: SampledTokens) -> Any:
        """Return the package's `ParsedResponse` of an answer."""
        prompt_ids, output_ids, tools = map(list, sampled)
        return self._renderer.parse_response(output_ids, tools=tools or None, prompt_ids=prompt_ids)


def renderer_of(chat: ChatTokenizer, *, name: str = AUTO) -> Renderer:
    """Return the renderer for the model of `chat`, and log the choice.

    `name`: `auto` takes a renderer of the package that produces the same tokens as the chat template, and else the chat
    template; `template` takes the chat template; any other name selects a renderer. Raises `ConfigError` if there is no
    such renderer, or the model lacks its tokens.
    """
    if name == TEMPLATE:
        return _template(chat)
    known = known_renderers(name)
    if name != AUTO:
        try:
            renderer = _made(name, chat)
        except Exception as error:  # the package may raise any exception
            raise ConfigError(f"rollout.agent.renderer = {name!r} does not fit the model: {error}") from error
        if differs := _difference(renderer, chat):
            log.warning("the renderer %s differs from the model's chat template: %s", name, differs)
        return renderer
    for kind in known:
        try:
            renderer = _made(kind, chat)
            differs = _difference(renderer, chat)
        except Exception as error:  # most renderers need special tokens that this model lacks
            differs = f"{type(error).__name__}: {error}"
        if not differs:
            log.info("conversations are rendered by %s of renderers, as the chat template writes them", kind)
            return renderer
        log.debug("the renderer %s does not fit the model: %s", kind, differs)
    return _template(chat)


def _template(chat: ChatTokenizer) -> Renderer:
    renderer = TemplateRenderer(chat)
    log.info("conversations are rendered by the chat template; %s", renderer.stability)
    return renderer


def _made(kind: str, chat: ChatTokenizer) -> ModelRenderer:
    from renderers import config_from_name, create_renderer

    return ModelRenderer(create_renderer(chat.tokenizer, config_from_name(kind)), chat, kind=kind)


def _difference(renderer: ModelRenderer, chat: ChatTokenizer) -> str:
    """Return the first test conversation in which `renderer` and the chat template differ; empty if there is none."""
    for messages, tools in _PROBES:
        try:
            expected: list[int] | None = chat.render(to_template(messages), tools)
        except StreamRLError:
            expected = None
        try:
            found: list[int] | None = renderer.render(messages, tools)
        except RequestRefused:
            found = None
        if found != expected:
            return ", ".join(message.role for message in messages) + (" with tools" if tools else "")
    return ""
