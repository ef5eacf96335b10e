"""What the gateway refuses, and that it says so in the form of the API that was asked."""

from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest

CHAT: Any = {"messages": [{"role": "user", "content": "hello"}]}
MESSAGES: Any = {**CHAT, "max_tokens": 5}


@pytest.fixture
async def send(served):
    """Sends a raw request, and returns the status and the decoded body."""
    async with aiohttp.ClientSession() as session:

        async def sent(path, data=b"{}", *, method="POST", key="secret", **headers):
            headers = {"Authorization": f"Bearer {key}", **headers}
            async with session.request(method, served.root + path, data=data, headers=headers) as answer:
                assert answer.content_type == "application/json"
                return answer.status, await answer.json()

        yield sent


def is_openais(body):
    return set(body) == {"error"} and {"message", "type", "param", "code"} <= set(body["error"])


def is_anthropics(body):
    return body["type"] == "error" and set(body["error"]) == {"type", "message"}


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/episodes/e1/v1/embeddings", 404, "/episodes/e1/v1/embeddings"),
        ("GET", "/", 404, "GET /"),
        ("GET", "/episodes/e1/v1/chat/completions", 405, "POST"),
        ("DELETE", "/episodes/e1/v1/models", 405, "GET"),
        ("PUT", "/inference/v1/generate", 405, "POST"),
    ],
)
async def test_unknown_paths_and_methods(send, method, path, status, words):
    found, body = await send(path, method=method)
    assert found == status
    assert is_openais(body)
    assert words in body["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"]
)
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"a": ' + b"[" * 100_000, b'{"messages": 1, "prompt": 1, "input": 1}'],
    ids=["empty", "cut", "list", "null", "no text", "deep", "wrong types"],
)
async def test_bodies_that_cannot_be_read(send, served, path, data):
    status, body = await send("/episodes/e1" + path, data)
    assert status == 400
    assert is_anthropics(body) if path == "/v1/messages" else is_openais(body)
    assert not served.episode.requests


CHANGES_THE_POLICY = "not supported, because it changes the policy's probabilities or its input; leave it out"
SMALLEST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x"},
    "/inference/v1/generate": {"token_ids": [1]},
}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/chat/completions": [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot"}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "add"}}]}, "messages[0].function_call"),
        ({"n": 0}, ">= 1 - at `$.n`"),
        ({"n": "two"}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"tool_choice": "required"}, f"tool_choice: {CHANGES_THE_POLICY}"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"documents": [{"text": "x"}]}, "documents"),
    ],
    "/v1/completions": [
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
    "/v1/messages": [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"a": 1}}}, "output_config"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ],
    "/v1/responses": [({"logit_bias": {"1": -100}}, "logit_bias")],
    "/inference/v1/generate": [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"sampling_params": {"logit_bias": {"1": -100}}}, "logit_bias"),
        ({"sampling_params": {"presence_penalty": 0.5}}, "presence_penalty"),
        ({"sampling_params": {"structured_outputs": {"json": {}}}}, "structured_outputs"),
    ],
}


@pytest.mark.parametrize(("path", "change", "words"), [(path, *case) for path in REFUSED for case in REFUSED[path]])
async def test_fields_that_make_no_sense(send, served, path, change, words):
    """`change`: what differs from a request that is answered; None: a field that is missing."""
    body = {name: value for name, value in (SMALLEST[path] | change).items() if value is not None}
    status, answer = await send("/episodes/e1" + path, msgspec.json.encode(body))
    assert status == 400
    assert words in answer["error"]["message"]
    assert not served.episode.requests


@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_that_are_too_large(send, chunked):
    large = b" " * 50_000_000

    async def chunks():
        for start in range(0, len(large), 1 << 20):
            yield large[start : start + (1 << 20)]

    status, body = await send("/episodes/e1/v1/chat/completions", chunks() if chunked else large)
    assert (status, is_openais(body)) == (413, True)
    status, body = await send("/episodes/e1/v1/messages", chunks() if chunked else large)
    assert (status, is_anthropics(body), body["error"]["type"]) == (413, True, "request_too_large")


async def test_a_wrong_key_and_another_episode(send):
    for path, key in [("/episodes/e1", "other"), ("/episodes/e2", "secret"), ("/episodes/e1", "")]:
        status, body = await send(path + "/v1/chat/completions", key=key)
        assert (status, is_openais(body), body["error"]["type"]) == (401, True, "authentication_error")
        status, body = await send(path + "/v1/messages", key=key)
        assert (status, is_anthropics(body), body["error"]["type"]) == (401, True, "authentication_error")


async def test_an_episode_that_has_ended(send, served):
    served.episode.ended = True
    assert (await send("/episodes/e1/v1/chat/completions"))[0] == 410
    assert (await send("/episodes/e1/v1/models", method="GET"))[0] == 410
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="secret") as client:
        with pytest.raises(openai.APIStatusError, match="ended") as refused:
            await client.chat.completions.create(model="m", **CHAT)
    assert refused.value.status_code == 410
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="secret") as client:
        with pytest.raises(anthropic.APIStatusError, match="ended") as refused:
            await client.messages.create(model="m", **MESSAGES)
    assert refused.value.status_code == 410


@pytest.mark.parametrize("body", [b"", b"[]", b'{"score": "high"}', b'{"score": null}', b'{"score": NaN}'])
async def test_a_score_is_a_number(send, body):
    status, refused = await send("/episodes/e1/score", body)
    assert status == 400
    assert '{"score": NUMBER}' in refused["error"]["message"]
