"""The token endpoint that verifiers asks, at the server's root."""

import aiohttp
import pytest


@pytest.fixture
async def generate(served):
    async with aiohttp.ClientSession() as session:

        async def asked(headers, *, url=served.root, **sampling):
            body = {"model": "policy", "token_ids": [1, 2], "sampling_params": {"logprobs": 1, **sampling}}
            headers = {"Authorization": "Bearer secret", **headers}
            async with session.post(url + "/inference/v1/generate", json=body, headers=headers) as answer:
                return answer.status, await answer.json()

        yield asked


async def test_tokens_and_their_log_probabilities(served, generate):
    status, body = await generate({"X-Session-ID": "session"}, stop_token_ids=[7], max_tokens=9, temperature=1.0)
    assert (status, isinstance(body["request_id"], str)) == (200, True)
    (choice,) = body["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([3, 4], "stop")
    assert choice["logprobs"]["content"] == [
        {"token": "token_id:3", "logprob": -0.5},
        {"token": "token_id:4", "logprob": -0.25},
    ]
    (asked,) = served.episode.requests
    assert (asked.prompt, asked.stop_token_ids, asked.max_tokens, asked.messages) == ((1, 2), (7,), 9, ())


async def test_the_session_is_the_episode(served, generate):
    assert (await generate({"X-Session-ID": "session"}))[0] == 200
    assert (await generate({}))[0] == 200
    assert (await generate({"X-Session-ID": "other"}, url=served.url))[0] == 200
    assert served.episode.names == ["session", "", "e1"]
    assert (await generate({"X-Session-ID": "unknown"}))[0] == 401
    assert (await generate({"X-Session-ID": "session", "Authorization": "Bearer other"}))[0] == 401


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/inference/v1/generate", {"token_ids": [1, 4, 5, 7]}, "token id 5, at place 2 (from 0) of the prompt"),
        ("/v1/completions", {"prompt": [7]}, "token id 7, at place 0 (from 0) of the prompt"),
        (
            "/inference/v1/generate",
            {"token_ids": [4], "sampling_params": {"stop_token_ids": [4, 5]}},
            "token id 5, at place 1 (from 0) of stop_token_ids",
        ),
    ],
)
async def test_tokens_that_the_model_does_not_have_are_the_callers_fault(serve, path, body, words):
    served = await serve(vocab_size=5)
    headers = {"Authorization": "Bearer secret"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(served.root + path, json=body) as answer:
            found = await answer.json()
        assert (answer.status, found["error"]["message"]) == (
            400,
            f"{words}, is outside the model's vocabulary of 5 tokens",
        )
        assert not served.episode.requests
        async with session.post(served.root + "/inference/v1/generate", json={"token_ids": [0, 4]}) as answer:
            assert answer.status == 200
