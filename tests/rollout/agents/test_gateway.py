"""The gateway, asked by the real clients; a scripted episode answers."""

from typing import Any

import anthropic
import openai
import pytest

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED: Any = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("tools", [[], [TOOL]])
async def test_chat(served, tools):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="secret") as client:
        answer = await client.chat.completions.create(model="m", messages=ASKED, tools=tools, n=2)
        assert [choice.message.content for choice in answer.choices] == ["answer 1"] * 2
        assert bool(answer.choices[0].message.tool_calls) == bool(tools)
        stream = await client.chat.completions.create(model="m", messages=ASKED, tools=tools, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "answer 2"
        assert (await client.completions.create(model="m", prompt="x")).choices[0].text == "answer 3"
        assert served.episode.seen == 4
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            await client.chat.completions.create(model="m", messages=ASKED, logit_bias={"1": 1})
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="other") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_messages(served):
    tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="secret") as client:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 10, "messages": ASKED}
        answer = await client.messages.create(**asked, tools=tools)
        assert answer.content[1].input == {"a": 1}
        async with client.messages.stream(**asked, tools=tools) as stream:
            final = await stream.get_final_message()
        assert (final.content[0].text, final.content[1].input) == ("answer 2", {"a": 1})
        with pytest.raises(anthropic.BadRequestError, match="image"):
            await client.messages.create(
                model="m", max_tokens=1, messages=[{"role": "user", "content": [{"type": "image"}]}]
            )
