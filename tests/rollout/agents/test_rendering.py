"""Conversations with tools become tokens, and tokens become messages."""

from __future__ import annotations

import msgspec
import pytest

from streamrl.rollout.agents.messages import Message, RequestRefused, ToolCall
from streamrl.rollout.agents.rendering import SampledTokens, TemplateRenderer, parse_text
from tests.rollout.characters import make_chat

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_a_further_turn_is_what_the_template_writes_there() -> None:
    chat = make_chat(TEMPLATE)
    renderer = TemplateRenderer(chat)
    first = [Message(role="user", content="hello")]
    answer = Message(role="assistant", content="yes?")
    result = Message(role="tool", content="rain", tool_call_id="call_1")
    prompt = renderer.render(first, [TOOL])
    output = chat.encode("yes?<|im_end|>")
    extended = [*prompt, *output, *(renderer.extend(SampledTokens(prompt, output, [TOOL]), [result]) or [])]
    assert extended == renderer.render([*first, answer, result], [TOOL])


def test_calls_of_tools_and_their_results_are_shown_to_the_template() -> None:
    chat = make_chat(TEMPLATE)
    call = ToolCall(id="call_1", name="look", arguments='{"x": 1}')
    text = chat.decode(TemplateRenderer(chat).render([Message(role="assistant", tool_calls=(call,))], []))
    assert '{"x": 1}' in text.replace("\\", "")
    assert "look" in text


def test_where_the_template_wants_the_call_before_its_result_the_conversation_is_written_anew() -> None:
    alone = "m['role'] == 'tool' and not loop.previtem['tool_calls']"
    refusal = f"{{% if {alone} %}}{{{{ raise_exception('no call') }}}}{{% endif %}}"
    chat = make_chat(TEMPLATE.replace("<|im_start|>{{ m", refusal + "<|im_start|>{{ m"))
    renderer = TemplateRenderer(chat)
    asked = Message(role="user", content="hello")
    called = Message(role="assistant", tool_calls=(ToolCall(id="call_1", name="look", arguments="{}"),))
    result = Message(role="tool", content="rain", tool_call_id="call_1")
    prompt = renderer.render([asked], [TOOL])
    assert renderer.extend(SampledTokens(prompt, chat.encode("look<|im_end|>"), [TOOL]), [result]) is None
    assert "rain" in chat.decode(renderer.render([asked, called, result], [TOOL]))
    with pytest.raises(RequestRefused, match="no call"):
        renderer.render([asked, result], [TOOL])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>', "", [("look", {"x": 1})]),
        (
            'I look.\n<tool_call>{"name": "look", "arguments": {}}</tool_call>'
            '<tool_call>{"name": "look", "arguments": {"x": {"y": 2}}}</tool_call>',
            "I look.",
            [("look", {}), ("look", {"x": {"y": 2}})],
        ),
        ('<tool_call>{"name": "look"}</tool_call>', '<tool_call>{"name": "look"}</tool_call>', []),
        ("<tool_call>{look}</tool_call>", "<tool_call>{look}</tool_call>", []),
        (
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            [],
        ),
        ("no call ", "no call ", []),
    ],
)
def test_calls_of_tools_are_found_and_what_is_none_stays_text(
    text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    said = parse_text(text, tools=[TOOL])
    assert said.content == content
    assert [(call.name, msgspec.json.decode(call.arguments)) for call in said.tool_calls] == calls
    assert len({call.id for call in said.tool_calls}) == len(calls)
    assert parse_text(text, tools=[]).content == text
