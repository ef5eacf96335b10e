"""Anthropic's messages, asked by the real client."""

from typing import Any

import anthropic
import pytest

from streamrl.rollout.agents.messages import Message, ToolCall

ASKED: Any = {"model": "policy", "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}]}
TOOLS: Any = [{"name": "add", "input_schema": {"type": "object"}}]


@pytest.fixture
async def client(served):
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="secret", max_retries=0) as client:
        yield client


async def whole(client):
    return await client.messages.create(**ASKED, tools=TOOLS)


async def streamed(client):
    async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
        return await stream.get_final_message()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{ "a":\n 1.0, "b": "\\u00e9" }', {"a": 1.0, "b": "é"}),
        ("{}", {}),
        ('{"a": 1', '{"a": 1'),
        ("[1]", "[1]"),
        ('"text"', '"text"'),
        ("", ""),
    ],
)
async def test_arguments_of_tools_and_the_conversation_with_their_result(client, served, ask, arguments, found):
    served.episode.arguments = arguments
    served.episode.reasoning = "hm"
    answer = await ask(client)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.content[0].signature  # without one clients take it for broken off
    call = answer.content[2]
    assert (call.id, call.name, call.input) == ("call_1", "add", found)
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
    said: Any = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    await client.messages.create(**{**ASKED, "messages": ASKED["messages"] + said}, tools=TOOLS)
    _, back, told = served.episode.requests[1].messages
    assert (back.role, back.content, back.reasoning) == ("assistant", "answer 1", "hm")
    assert told == Message("tool", "2", tool_call_id="call_1")
    if isinstance(found, str):
        assert back.tool_calls == (ToolCall("call_1", "add", arguments),)
    else:
        assert back.tool_calls[0].arguments in (arguments, *({'{"a":1}', '{"a":1.0,"b":"é"}', "{}"}))


async def test_a_system_prompt_and_results_before_text(client, served):
    content = [{"type": "tool_result", "tool_use_id": "1", "content": "2"}, {"type": "text", "text": "and now?"}]
    said = [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]
    messages: Any = [{"role": "assistant", "content": said}, {"role": "user", "content": content}]
    await client.messages.create(**{**ASKED, "messages": messages}, system=[{"type": "text", "text": "be brief"}])
    assert served.episode.requests[0].messages == (
        Message("system", "be brief"),
        Message("assistant", tool_calls=(ToolCall("1", "add", "{}"),)),
        Message("tool", "2", tool_call_id="1"),
        Message("user", "and now?"),
    )
