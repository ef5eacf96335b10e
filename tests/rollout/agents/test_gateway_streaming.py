"""Answers that go out while they are generated, asked by the real clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.rollout.agents.messages import Completion, Message, MessagePiece, RequestRefused, ToolCall
from streamrl.rollout.agents.rendering import certain_text, parse_text
from streamrl.stop_strings import before_stop

ASKED: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WHOLE = Message("assistant", "one two", "hm", (ToolCall("call_1", "add", "{}"),))


@pytest.fixture
def speaking(served):
    """An episode that says `one`, waits for `go`, and says the rest; it counts how often it was asked."""
    served.go, served.asked, served.cancelled, served.error = asyncio.Event(), 0, asyncio.Event(), None
    served.said = WHOLE

    async def complete(request, *, call, on_piece):
        served.asked += 1
        on_piece(MessagePiece(0, reasoning=served.said.reasoning))
        on_piece(MessagePiece(0, "one"))
        try:
            await served.go.wait()
        except asyncio.CancelledError:
            served.cancelled.set()
            raise
        if served.error is not None:
            raise served.error
        on_piece(MessagePiece(0, " t"))
        reason = "tool_calls" if served.said.tool_calls else "stop"
        return [Completion(served.said, reason, (1, 2), (3, 4), (-0.5, -0.25), ("a", "b"))]

    served.episode.complete = complete
    return served


def openais(served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="secret", max_retries=0)


async def test_a_chat_is_streamed_as_it_comes(speaking):
    async with openais(speaking) as client:
        stream = await client.chat.completions.create(model="m", messages=ASKED, tools=TOOLS, stream=True)
        pieces: list[Any] = []
        async for chunk in stream:
            pieces.append(chunk.choices[0])
            if chunk.choices[0].delta.content == "one":
                speaking.go.set()  # only now is there more to say
    assert "".join(piece.delta.content or "" for piece in pieces) == "one two"
    assert [piece.delta.reasoning_content for piece in pieces if hasattr(piece.delta, "reasoning_content")] == ["hm"]
    assert [piece.delta.role for piece in pieces if piece.delta.role] == ["assistant"]
    (calls,) = [piece.delta.tool_calls for piece in pieces if piece.delta.tool_calls]
    assert (calls[0].function.name, pieces[-1].finish_reason) == ("add", "tool_calls")
    assert speaking.episode.seen == 1


async def test_anthropics_messages_are_streamed_as_they_come(speaking):
    client = anthropic.AsyncAnthropic(base_url=speaking.url, api_key="secret", max_retries=0)
    async with client, client.messages.stream(model="m", max_tokens=9, messages=ASKED) as stream:
        texts = []
        async for text in stream.text_stream:
            texts.append(text)
            speaking.go.set()
        message = await stream.get_final_message()
    assert "".join(texts) == "one two"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[0].thinking, message.content[1].text) == ("hm", "one two")
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", 2)


async def test_responses_are_streamed_as_they_come(speaking):
    async with openais(speaking) as client, client.responses.stream(model="m", input="hello") as stream:
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                speaking.go.set()
        whole = await stream.get_final_response()
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert (deltas, whole.output_text) == (["one", " t", "wo"], "one two")
    (arguments,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert arguments.arguments == "{}"
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]


async def test_who_asks_again_in_mid_stream_hears_it_from_the_beginning(speaking):
    body = {"model": "m", "messages": ASKED, "stream": True}
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
        async with session.post(speaking.url + "/v1/chat/completions", json=body) as first:
            await first.content.readuntil(b"one")
        async with session.post(speaking.url + "/v1/chat/completions", json=body) as again:
            await again.content.readuntil(b"one")
            assert speaking.episode.seen == 0
            speaking.go.set()
            rest = (await again.read()).decode()
    chunks = [json.loads(line[6:]) for line in rest.split("\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == " two"
    assert (speaking.asked, speaking.episode.seen, speaking.gateway.retries_answered) == (1, 1, 1)


async def test_an_error_in_mid_stream_is_an_event(speaking):
    speaking.error = RequestRefused("the policy cannot be asked", status=503, kind="api_error")
    speaking.go.set()
    async with openais(speaking) as client:
        with pytest.raises(openai.APIError, match="the policy cannot be asked"):
            async for _ in await client.chat.completions.create(model="m", messages=ASKED, stream=True):
                pass
    assert speaking.episode.seen == 0


PARTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "add", "arguments": {}}',
    "{}",
    "st",
    "stop",
    "<",
]


@given(
    st.lists(st.sampled_from([*PARTS, " ", "\n", "a", "b"]), max_size=12),
    st.integers(0, 60),
    st.sampled_from(["", "<think>"]),
    st.booleans(),
    st.sampled_from([(), ("stop",), ("top", "b\n")]),
)
def test_what_is_certain_is_the_beginning_of_what_will_be_said(parts, length, opening, tools, stops):
    text = "".join(parts)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    text = text[: min(ends, default=len(text))]  # generation ends at the first stop string
    matched = next((stop for stop in stops if text.endswith(stop)), "")
    whole = parse_text(opening + before_stop(text, matched), tools=TOOLS if tools else [])
    certain = certain_text(opening, text[:length], stops=stops, tools=TOOLS if tools else [])
    assert whole.content.startswith(certain.content)
    assert whole.reasoning.startswith(certain.reasoning)
    assert not certain.content or certain.reasoning == whole.reasoning
