"""A tool's result is rendered with the name of its tool, whichever API the agent speaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streamrl.rollout.agents.messages import ToolCall
from streamrl.rollout.agents.protocols import anthropic, chat, responses
from streamrl.rollout.agents.rendering import TemplateRenderer
from streamrl.rollout.agents.workflow import Episode
from tests.rollout.agents.test_drift import Scripted
from tests.rollout.qwen import make_qwen

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' functions.' + (m.name or 'unknown') if m.role == 'tool' }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes who speaks as the format of gpt-oss does."""
CALLS = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("look", "add"))
SCHEMA: dict[str, Any] = {"type": "object"}


def of_chat(calls: tuple[ToolCall, ...]) -> tuple[Any, dict[str, Any]]:
    called = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "{}"}} for call in calls]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    if calls:
        messages.append({"role": "assistant", "content": "", "tool_calls": called})
        messages += [{"role": "tool", "content": "ok", "tool_call_id": call.id} for call in reversed(calls)]
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "add")]
    return chat, {"messages": messages, "tools": tools}


def of_responses(calls: tuple[ToolCall, ...]) -> tuple[Any, dict[str, Any]]:
    items: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    items += [{"type": "function_call", "call_id": call.id, "name": call.name, "arguments": "{}"} for call in calls]
    items += [{"type": "function_call_output", "call_id": call.id, "output": "ok"} for call in reversed(calls)]
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("look", "add")]
    return responses, {"input": items, "tools": tools}


def of_anthropic(calls: tuple[ToolCall, ...]) -> tuple[Any, dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    if calls:
        used = [{"type": "tool_use", "id": call.id, "name": call.name, "input": {}} for call in calls]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in reversed(calls)]
        messages += [{"role": "assistant", "content": used}, {"role": "user", "content": results}]
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("look", "add")]
    return anthropic, {"messages": messages, "tools": tools, "max_tokens": 9}


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("body", [of_chat, of_responses, of_anthropic])
async def test_a_result_has_the_name_of_the_tool_that_was_called(
    body: Callable[[tuple[ToolCall, ...]], tuple[Any, dict[str, Any]]], edited: bool
) -> None:
    spoken = make_qwen(TEMPLATE)
    session: Any = Scripted(spoken.encode(f"{CALLS}<|im_end|>"), spoken.encode("so<|im_end|>"))
    session.chat = spoken
    episode = Episode(session, TemplateRenderer(spoken), max_calls=10)

    async def ask(calls: tuple[ToolCall, ...]) -> Any:
        api, asked = body(calls)
        (answer,) = await episode.complete(api.parse(json.dumps(asked).encode()).request, call=str(len(calls)))
        return answer

    calls = (await ask(())).message.tool_calls
    if edited:  # a history that the policy never had is rendered as a whole
        calls = tuple(msgspec.structs.replace(call, id=f"other_{call.id}") for call in calls)
    asked = spoken.tokenizer.decode(list((await ask(calls)).prompt_ids), skip_special_tokens=False)
    assert "tool functions.add\nok" in asked
    assert asked.index("functions.add") < asked.index("tool functions.look\nok")
    assert episode.rewritten == edited
