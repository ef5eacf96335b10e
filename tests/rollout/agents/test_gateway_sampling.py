"""What is answered and logged where agents ask for sampling and log-probabilities of their own."""

from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from streamrl.rollout.agents.gateway import Sampling

ASKED: Any = [{"role": "user", "content": "hello"}]
RUN = Sampling(temperature=0.7, top_p=0.9, top_k=20)


@pytest.fixture
async def served(serve):
    return await serve(sampling=RUN)


@pytest.fixture
async def client(served):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


async def test_sampling_like_the_runs_is_no_warning(served, client, caplog):
    like: Any = {"temperature": 0.7, "top_p": 0.9}
    extra = {"top_k": 20, "min_p": 0, "repetition_penalty": 1.0, "min_tokens": 0}
    await client.chat.completions.create(model="policy", messages=ASKED, **like, extra_body=extra)
    await client.completions.create(model="policy", prompt="x", **like)
    await client.responses.create(model="policy", input="x", **like)
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="secret") as other:
        body: Any = {**like, "top_k": 20}
        await other.messages.create(model="policy", max_tokens=1, messages=ASKED, extra_body=body)
    await generate(served, {"temperature": 0.7, "top_p": 0.9, "top_k": 20})
    assert not caplog.messages


async def test_sampling_unlike_the_runs_is_one_warning_for_each_setting(served, client, caplog):
    for temperature in (0.0, 1.0):
        await client.chat.completions.create(model="policy", messages=ASKED, temperature=temperature, top_p=0.9)
    assert caplog.messages == ["agents ask for a temperature of 0.0; the run's 0.7 is used"]
    await generate(served, {"top_k": 5, "top_p": 1})
    assert sorted(caplog.messages[1:]) == [
        "agents ask for a top_k of 5; the run's 20 is used",
        "agents ask for a top_p of 1.0; the run's 0.9 is used",
    ]


async def test_what_is_left_out_is_one_warning_for_each_setting(served, client, caplog):
    for seed in (1, 2):
        await client.chat.completions.create(model="policy", messages=ASKED, seed=seed, reasoning_effort="low")
    asked: Any = {"model": "policy", "messages": ASKED, "parallel_tool_calls": True}
    await client.chat.completions.create(**asked)
    await client.chat.completions.create(**{**asked, "parallel_tool_calls": False})
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="secret") as other:
        extra: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        one: Any = {"type": "auto", "disable_parallel_tool_use": True}
        await other.messages.create(model="policy", max_tokens=1, messages=ASKED, tool_choice=one, extra_body=extra)
    assert sorted(caplog.messages) == [
        "agents ask for parallel_tool_calls = False; it is left out",
        "agents ask for reasoning_effort = 'low'; it is left out",
        "agents ask for seed = 1; it is left out",
        "agents ask for thinking = {'type': 'enabled', 'budget_tokens': 1024}; it is left out",
        "agents ask for tool_choice.disable_parallel_tool_use = True; it is left out",
    ]


async def test_tokens_that_end_answers_are_told_in_each_api_that_has_them(served, client):
    await client.chat.completions.create(model="policy", messages=ASKED, extra_body={"stop_token_ids": [7]})
    await client.completions.create(model="policy", prompt="x", extra_body={"stop_token_ids": [7]})
    await generate(served, {"stop_token_ids": [7]})
    assert [request.stop_token_ids for request in served.episode.requests] == [(7,)] * 3


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


async def test_of_the_likeliest_tokens_there_is_the_sampled_one(client, caplog):
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=ASKED, logprobs=True, top_logprobs=5)
    token = answer.choices[0].logprobs.content[0]
    assert [(top.token, top.logprob) for top in token.top_logprobs] == [("a", -0.5)]
    assert len(caplog.messages) == 1
    assert "top_logprobs" in caplog.text
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        await client.chat.completions.create(model="policy", messages=ASKED, logprobs=True, top_logprobs=21)


async def test_log_probabilities_of_completions(client, caplog):
    none = await client.completions.create(model="policy", prompt="x")
    assert none.choices[0].logprobs is None
    found = (await client.completions.create(model="policy", prompt="x", logprobs=0)).choices[0].logprobs
    assert (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset) == (
        ["a", "b"],
        [-0.5, -0.25],
        None,
        [0, 1],
    )
    assert not caplog.messages
    found = (await client.completions.create(model="policy", prompt="x", logprobs=5)).choices[0].logprobs
    assert found.top_logprobs == [{"a": -0.5}, {"b": -0.25}]
    assert len(caplog.messages) == 1


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


async def test_another_model_is_one_warning(client, caplog):
    for _ in range(2):
        await client.chat.completions.create(model="gpt-5", messages=ASKED)
    assert caplog.messages == ["agents ask for the model 'gpt-5'; the policy answers"]


async def generate(served, sampling, *, path="/inference/v1/generate", key="secret", **headers):
    """Ask the token endpoint as verifiers does; returns the status and the body."""
    headers = {"Authorization": f"Bearer {key}", **headers}
    body = {"model": "policy", "token_ids": [1, 2], "sampling_params": sampling}
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.root + path, json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()
