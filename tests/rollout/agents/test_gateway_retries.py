"""Which requests the gateway answers with the generation of an earlier one."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

ASKED: Any = [{"role": "user", "content": "hello"}]
BODY: Any = {"model": "policy", "messages": ASKED}


@pytest.fixture
async def ask(served):
    """Asks for a chat completion with aiohttp, and returns the status and the text or the error's message."""
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:

        async def asked(body=BODY, path="/v1/chat/completions", **headers):
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.post(served.url + path, json=body, headers=headers) as answer:
                found = await answer.json()
            if "error" in found:
                return answer.status, found["error"]["message"]
            choice = found["choices"][0]
            return answer.status, choice["text"] if "text" in choice else choice["message"]["content"]

        yield asked


async def hang_up(served, ask):
    served.episode.may_answer.clear()
    call = asyncio.create_task(ask())
    await served.episode.started.acquire()
    await served.episode.found.acquire()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("finished", [False, True])
async def test_a_client_that_hung_up_gets_the_generation_that_it_asked_for(served, ask, finished):
    await hang_up(served, ask)
    if finished:
        served.episode.may_answer.set()
        await served.episode.finished.wait()
    again = asyncio.create_task(ask())
    await served.episode.found.acquire()
    served.episode.may_answer.set()
    assert await again == (200, "answer 1")
    assert (len(served.episode.requests), served.episode.seen, served.gateway.retries_answered) == (1, 1, 1)
    assert await ask() == (200, "answer 2")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_stayed_in_the_buffers_was_not_delivered(served, ask, stream):
    served.episode.padding = "." * 20_000_000
    body = json.dumps({**BODY, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection(*served.root.removeprefix("http://").split(":"), limit=1)
    host = served.root.removeprefix("http://")
    head = f"POST /episodes/e1/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer secret\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await served.episode.finished.wait()
    assert await reader.read(1)
    writer.close()
    await writer.wait_closed()
    assert served.episode.seen == 0
    async with aiohttp.ClientSession() as session:
        url, headers = served.url + "/v1/chat/completions", {"Authorization": "Bearer secret"}
        async with session.post(url, data=body, headers=headers) as answer:
            assert b"answer 1" in await answer.read()
    assert (len(served.episode.requests), served.episode.seen) == (1, 1)


async def answer_the_second(episode):
    """Let the episode answer when it has been asked a second time."""
    episode.may_answer.clear()
    for _ in range(2):
        await episode.found.acquire()
    episode.may_answer.set()


@pytest.mark.parametrize("streamed", [False, True])
async def test_clients_that_time_out_ask_again_by_themselves(served, streamed):
    answering = asyncio.create_task(answer_the_second(served.episode))
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="secret", timeout=0.5, max_retries=5) as client:
        answer = await client.chat.completions.create(model="m", messages=ASKED, stream=streamed)
        if streamed:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        else:
            text = answer.choices[0].message.content
    await answering
    assert (text, len(served.episode.requests)) == ("answer 1", 1)


async def test_an_idempotency_key_is_bound_to_path_and_body(served, ask):
    assert await ask(Idempotency_Key="k") == (200, "answer 1")
    assert await ask(Idempotency_Key="k") == (200, "answer 1")
    for body, path in [({**BODY, "n": 2}, "/v1/chat/completions"), ({"prompt": "x"}, "/v1/completions")]:
        status, message = await ask(body, path, Idempotency_Key="k")
        assert (status, "Idempotency-Key" in message) == (422, True)
    assert await ask(Idempotency_Key="other") == (200, "answer 2")
    assert (len(served.episode.requests), served.gateway.retries_answered) == (2, 1)


@pytest.mark.parametrize("retried", ["0", "1"])
async def test_of_two_that_ask_the_same_at_once_one_hangs_up(served, ask, retried):
    served.episode.may_answer.clear()
    first, second = [asyncio.create_task(ask()) for _ in range(2)]
    for _ in range(2):
        await served.episode.started.acquire()
        await served.episode.found.acquire()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    again = asyncio.create_task(ask(x_stainless_retry_count=retried))
    await served.episode.found.acquire()
    served.episode.may_answer.set()
    assert sorted([await again, await second]) == [(200, "answer 1"), (200, "answer 2")]
    assert (len(served.episode.requests), served.episode.seen) == (2, 2)
