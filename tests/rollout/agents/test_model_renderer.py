"""A renderer of the package writes what the chat template writes, and reads what the model says."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.base import MODEL_RENDERER_MAP
from tokenizers import AddedToken

from streamrl.errors import ConfigError
from streamrl.rollout.agents.messages import Message, ToolCall
from streamrl.rollout.agents.model_renderer import WHOLE_ANSWERS, ModelRenderer, renderer_of
from streamrl.rollout.agents.rendering import SampledTokens, to_template
from streamrl.rollout.chat import ChatTokenizer
from tests.rollout.characters import make_chat
from tests.rollout.qwen import make_qwen

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
ASKED = Message("user", "What is 2 + 2?")


@pytest.fixture(scope="module")
def qwen() -> ChatTokenizer:
    return make_qwen()


@pytest.fixture(scope="module")
def renderer(qwen: ChatTokenizer) -> ModelRenderer:
    found = renderer_of(qwen)
    assert isinstance(found, ModelRenderer)
    return found


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """What users, the model and tools say in turn, with a system message or without."""
    text = st.text(st.sampled_from("ab2 +?\n.é<>"), max_size=8)
    words = text.filter(lambda said: "</think>" not in said)
    found = [Message("system", draw(words.filter(bool)))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        found.append(Message("user", draw(words)))
        for number in range(draw(st.integers(0, 2))):
            call = ToolCall(f"call_{turn}_{number}", "look", '{"x": [1, "a"], "y": null}')
            # templates write line breaks around reasoning and calls in a way of their own
            said, thought = draw(words).strip(), draw(words).strip()
            found.append(Message("assistant", said, thought, (call,)))
            found += [Message("tool", draw(words), tool_call_id=call.id)] * draw(st.integers(1, 2))
        if turn:
            found.insert(-1, Message("assistant", draw(words).strip(), draw(words).strip()))
    return found


@settings(deadline=None, max_examples=100)
@given(messages=conversations(), tools=st.sampled_from([[], [TOOL]]))
def test_it_writes_the_tokens_of_the_chat_template(
    qwen: ChatTokenizer, renderer: ModelRenderer, messages: list[Message], tools: list[dict[str, object]]
) -> None:
    assert renderer.render(messages, tools) == qwen.render(to_template(messages), tools)


@pytest.mark.parametrize(
    ("said", "further"),
    [
        ("4<|im_end|>", None),
        ("<think>\nTwo.\n</think>\n\n4<|im_end|>", None),
        ('<think>\nA tool.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>', 1),
        ('So:\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>', 2),
    ],
)
def test_it_extends_within_a_cycle_of_tools_and_writes_anew_what_comes_after(
    qwen: ChatTokenizer, renderer: ModelRenderer, said: str, further: int | None
) -> None:
    prompt = renderer.render([ASKED], [TOOL])
    output = qwen.encode(said)
    answer = renderer.parse(SampledTokens(prompt, output, [TOOL]), matched_stop="")
    if further is None:  # the user speaks: reasoning of earlier turns is left out from here on
        new = [Message("user", "Sure?")]
        assert renderer.extend(SampledTokens(prompt, output, [TOOL]), new) is None
    else:
        new = [Message("tool", "rain", tool_call_id="call_1")] * further
        extended = renderer.extend(SampledTokens(prompt, output, [TOOL]), new)
        assert extended is not None
        assert [*prompt, *output, *extended] == qwen.render(to_template([ASKED, answer, *new]), [TOOL])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("4<|im_end|>", Message("assistant", "4")),
        ("<think>\nTwo.\n</think>\n\n4<|im_end|>", Message("assistant", "4", "Two.")),
        ("<think>\nTwo", Message("assistant", "", "Two")),
        (
            'So:\n<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
            Message("assistant", "So:", tool_calls=(ToolCall("", "look", '{"x":1}'),)),
        ),
        (
            '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call><|im_end|>',
            Message("assistant", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
        ),
        ("<tool_call>\n{look}\n</tool_call><|im_end|>", Message("assistant", "<tool_call>\n{look}\n</tool_call>")),
    ],
)
def test_it_reads_what_the_model_says(
    qwen: ChatTokenizer, renderer: ModelRenderer, said: str, expected: Message
) -> None:
    prompt = renderer.render([ASKED], [TOOL])
    found = renderer.parse(SampledTokens(prompt, qwen.encode(said), [TOOL]), matched_stop="")
    calls = tuple(ToolCall("", call.name, call.arguments) for call in found.tool_calls)
    assert (found.content.strip(), found.reasoning, calls) == (
        expected.content,
        expected.reasoning,
        expected.tool_calls,
    )


@pytest.mark.parametrize(
    ("name", "says"), [("qwen9", "there is none; known: auto, template, qwen3"), ("qwen3", "does not fit the model")]
)
def test_a_renderer_that_cannot_be_had_is_named(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        renderer_of(make_chat(), name=name)


def test_drift_is_what_would_be_other_tokens_if_it_were_tokenized_anew(qwen: ChatTokenizer) -> None:
    whole = qwen.encode("add them<|im_end|>")
    assert qwen.retokenized(whole) == whole
    pieces = [*qwen.encode("ad"), *qwen.encode("d"), *qwen.encode(" them<|im_end|>")]
    assert pieces != whole
    assert qwen.retokenized(pieces) == whole


# --- answers of which more is to come ---


@pytest.fixture(scope="module")
def known() -> tuple[ChatTokenizer, dict[str, ModelRenderer]]:
    """The renderers that stream, and a tokenizer that has the tokens of all of them."""
    chat = make_qwen()
    tokenizer: Any = chat.tokenizer
    found: dict[str, ModelRenderer] = {}
    for kind in sorted({*MODEL_RENDERER_MAP.values()} - WHOLE_ANSWERS):
        while kind not in found:
            try:
                made = renderer_of(chat, name=kind)
            except ConfigError as error:
                (missing,) = re.findall(r"(?:token|for) '([^']+)'", str(error))
                tokenizer.add_tokens([AddedToken(missing, special=True, normalized=False)])
                continue
            assert isinstance(made, ModelRenderer)
            found[kind] = made
    return chat, found


WORDS = [*"ab {}é\n", "\n\n", "st", "stop", "<th", "ink>", "</th", "<tool", "<｜", "invoke", "look"]
BODIES = ['{"name": "look", "arguments": {}}', "<function=look>\n</function>", '<invoke name="look">', "look:0"]
BODIES += ["<｜DSML｜tool_calls>\n", '<｜DSML｜invoke name="look">\n', "</｜DSML｜invoke>\n", "</｜DSML｜tool_calls>"]


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_what_is_certain_is_the_beginning_of_what_will_have_been_said(
    known: tuple[ChatTokenizer, dict[str, ModelRenderer]], data: st.DataObject
) -> None:
    chat, renderers = known
    renderer = renderers[data.draw(st.sampled_from(sorted(renderers)))]
    tokenizer: Any = chat.tokenizer
    marks = [mark for mark in sorted(tokenizer.get_added_vocab()) if re.search("think|tool|arg|DSML|sistant", mark)]
    some = st.sampled_from([*WORDS, *BODIES]) | st.sampled_from(marks)
    output = chat.encode("".join(data.draw(st.lists(some, max_size=9), label="answer")))
    prompt = chat.encode(data.draw(st.sampled_from(["<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"])))
    stops = data.draw(st.sampled_from([(), ("stop",), ("top", "b\n")]), label="stops")
    tools = data.draw(st.sampled_from([[], [TOOL]]), label="tools")
    ends = (n for n in range(1, len(output) + 1) if any(stop in chat.decode(output[:n]) for stop in stops))
    output = output[: next(ends, len(output))]
    matched = next((stop for stop in stops if stop in chat.decode(output)), "")
    whole = renderer.parse(SampledTokens(prompt, output, tools), matched_stop=matched)
    for length in range(1, len(output) + 1):
        certain = renderer.certain(SampledTokens(prompt, output[:length], tools), stops=stops)
        assert whole.content.startswith(certain.content)
        assert whole.reasoning.startswith(certain.reasoning)
