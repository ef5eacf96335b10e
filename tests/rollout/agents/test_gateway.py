"""The gateway, asked by the real clients; a scripted episode answers."""

import anthropic
import openai
import pytest

from streamrl.rollout.agents.gateway import Gateway
from streamrl.rollout.agents.messages import Completion, Message, ToolCall


class Episode:
    def __init__(self):
        self.requests = []
        self.seen = 0

    async def complete(self, request):
        self.requests.append(request)
        calls = (ToolCall("call_1", "add", '{"a":1}'),) if request.tools else ()
        said = Message("assistant", f"answer {len(self.requests)}", tool_calls=calls)
        done = Completion(said, "tool_calls" if calls else "stop", (1, 2), (3, 4), (-0.5, -0.25), ("a", "b"))
        return [done] * request.n

    def delivered(self, completions):
        self.seen += len(completions)


@pytest.fixture
async def served():
    episode = Episode()

    class Only:
        def find(self, key, name):
            return episode if key == "secret" and name in ("", "e1") else None

    gateway = Gateway(Only(), model="policy")
    yield await gateway.start() + "/e1", episode, gateway
    await gateway.close()


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("tools", [[], [TOOL]])
async def test_chat(served, tools):
    url, episode, gateway = served
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="secret") as client:
        answer = await client.chat.completions.create(model="m", messages=ASKED, tools=tools, n=2, logprobs=True)
        assert [choice.message.content for choice in answer.choices] == ["answer 1"] * 2
        assert answer.choices[0].logprobs.content[0].logprob == -0.5
        assert bool(answer.choices[0].message.tool_calls) == bool(tools)
        stream = await client.chat.completions.create(model="m", messages=ASKED, tools=tools, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "answer 2"
        assert (await client.completions.create(model="m", prompt="x")).choices[0].text == "answer 3"
        same = {"Idempotency-Key": "k"}
        first, again = [
            await client.chat.completions.create(model="m", messages=ASKED, extra_headers=same) for _ in range(2)
        ]
        assert first.choices[0].message.content == again.choices[0].message.content == "answer 4"
        assert gateway.retries_answered == 1
        assert episode.seen == 5
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            await client.chat.completions.create(model="m", messages=ASKED, logit_bias={"1": 1})
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="other") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_messages(served):
    url, _, _ = served
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="secret") as client:
        asked = {"model": "m", "max_tokens": 10, "messages": ASKED}
        answer = await client.messages.create(**asked, tools=tools)
        assert answer.content[1].input == {"a": 1}
        async with client.messages.stream(**asked, tools=tools) as stream:
            final = await stream.get_final_message()
        assert (final.content[0].text, final.content[1].input) == ("answer 2", {"a": 1})
        with pytest.raises(anthropic.BadRequestError, match="image"):
            await client.messages.create(
                model="m", max_tokens=1, messages=[{"role": "user", "content": [{"type": "image"}]}]
            )
