"""OpenAI's responses, asked by the real client."""

import openai
import pytest

from streamrl.rollout.agents.messages import Message, ToolCall

TOOL = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "strict": False,
}
USER = Message("user", "hello")


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


async def test_text(client, served):
    answer = await client.responses.create(model="policy", input="hello", instructions="be brief", max_output_tokens=9)
    assert (answer.output_text, answer.status, answer.model) == ("answer 1", "completed", "policy")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (2, 2, 4)
    (asked,) = served.episode.requests
    assert asked.messages == (Message("system", "be brief"), USER)
    assert (asked.max_tokens, asked.tools) == (9, ())
    assert served.episode.seen == 1


async def test_items_are_messages(client, served):
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "add", "arguments": "not JSON"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
    ]
    await client.responses.create(model="policy", input=items)
    assert served.episode.requests[0].messages == (
        Message("system", "be brief"),
        USER,
        Message("assistant", "yes", "hm", (ToolCall("1", "add", "{}"), ToolCall("2", "add", "not JSON"))),
        Message("tool", "3", tool_call_id="1"),
        Message("tool", "4", tool_call_id="2"),
    )


@pytest.mark.parametrize("previous", [False, True])
async def test_a_tool_call_and_its_result(client, served, previous):
    served.episode.reasoning = "hm"
    question = {"role": "user", "content": "hello"}
    first = await client.responses.create(model="policy", input=[question], tools=[TOOL])
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.name, call.arguments, call.call_id) == ("add", '{"a": 1}', "call_1")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    if previous:
        asked = {"input": [result], "previous_response_id": first.id}
    else:
        asked = {"input": [question, *first.output, result]}
    second = await client.responses.create(model="policy", tools=[TOOL], **asked)
    assert second.output_text == "answer 2"
    asked = served.episode.requests[1]
    said = Message("assistant", "answer 1", "hm", (ToolCall("call_1", "add", '{"a": 1}'),))
    assert asked.messages == (USER, said, Message("tool", "2", tool_call_id="call_1"))
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert asked.tools == ({"type": "function", "function": function},)


async def test_responses_that_cannot_be_continued(client, served):
    unstored = await client.responses.create(model="policy", input="hello", store=False)
    for previous in (unstored.id, "resp_other"):
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            await client.responses.create(model="policy", input="hello", previous_response_id=previous)
    first = await client.responses.create(model="policy", input="hello")
    served.gateway.forget("secret")
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        await client.responses.create(model="policy", input="hello", previous_response_id=first.id)
