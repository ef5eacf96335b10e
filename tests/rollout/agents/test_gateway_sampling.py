"""What is answered and logged where agents ask for sampling and log-probabilities of their own."""

from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from streamrl.config import SamplingConfig

ASKED: Any = [{"role": "user", "content": "hello"}]
RUN = SamplingConfig(temperature=0.7, top_p=0.9, top_k=20)


@pytest.fixture
async def served(serve):
    return await serve(sampling=RUN)


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


async def test_sampling_unlike_the_runs_is_one_warning_for_each_setting(served, client, caplog):
    for temperature in (0.0, 1.0):
        await client.chat.completions.create(model="policy", messages=ASKED, temperature=temperature, top_p=0.9)
    assert caplog.messages == ["agents ask for a temperature of 0.0; the run's 0.7 is used"]
    await generate(served, {"top_k": 5, "top_p": 1})
    assert sorted(caplog.messages[1:]) == [
        "agents ask for a top_k of 5; the run's 20 is used",
        "agents ask for a top_p of 1.0; the run's 0.9 is used",
    ]


@pytest.mark.parametrize("top", [None, 0])
async def test_log_probabilities_of_what_was_sampled(client, caplog, top):
    extra: Any = {} if top is None else {"top_logprobs": top}
    answer = await client.chat.completions.create(model="policy", messages=ASKED, logprobs=True, **extra)
    tokens = answer.choices[0].logprobs.content
    assert [(token.token, token.logprob, token.top_logprobs) for token in tokens] == [("a", -0.5, []), ("b", -0.25, [])]
    stream = await client.chat.completions.create(model="policy", messages=ASKED, logprobs=True, stream=True, **extra)
    streamed = [chunk.choices[0].logprobs async for chunk in stream]
    assert [token.logprob for found in streamed if found for token in found.content] == [-0.5, -0.25]
    assert not caplog.messages


async def test_strings_that_end_answers_are_told_in_each_api(served, client):
    served.episode.matched_stop = ";"
    await client.chat.completions.create(model="policy", messages=ASKED, stop=";")
    await client.chat.completions.create(model="policy", messages=ASKED, stop=[";", "\n"])
    await client.completions.create(model="policy", prompt="x", stop=[";"])
    assert (await generate(served, {"stop": [";"]}))[0] == 200
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="secret") as other:
        asked: Any = {"model": "policy", "max_tokens": 1, "messages": ASKED, "stop_sequences": [";"]}
        whole = await other.messages.create(**asked)
        async with other.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    assert [request.stop for request in served.episode.requests] == [(";",), (";", "\n"), *[(";",)] * 4]
    for answer in (whole, streamed):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ";")


async def test_several_answers_are_choices_in_each_api_that_has_them(served, client):
    chat = await client.chat.completions.create(model="policy", messages=ASKED, n=3)
    completions = await client.completions.create(model="policy", prompt="x", n=3)
    _, tokens = await generate(served, {"n": 3})
    assert [request.n for request in served.episode.requests] == [3, 3, 3]
    for choices in (chat.choices, completions.choices):
        assert [choice.index for choice in choices] == [0, 1, 2]
    assert [choice["index"] for choice in tokens["choices"]] == [0, 1, 2]
    for create in (client.chat.completions.create, client.completions.create):
        asked: Any = {"messages": ASKED} if create == client.chat.completions.create else {"prompt": "x"}
        ended = [
            choice.index
            async for chunk in await create(model="policy", n=3, stream=True, **asked)
            for choice in chunk.choices
            if choice.finish_reason
        ]
        assert ended == [0, 1, 2]


async def generate(served, sampling):
    """Ask the token endpoint as verifiers does; returns the status and the body."""
    headers = {"Authorization": "Bearer secret"}
    body = {"model": "policy", "token_ids": [1, 2], "sampling_params": sampling}
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.root + "/inference/v1/generate", json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()
