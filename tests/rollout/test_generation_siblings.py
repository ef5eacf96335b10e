"""Siblings' requests travel as one, and each gets its own reply."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json

import pytest
from aiohttp import web

from streamrl.errors import PeerError, PeerLost, WireError
from streamrl.rollout.generation import SiblingRequests
from streamrl.transport.generation import GenerateRequest, GenerationClient


def answer(prompt, rid):
    """Echo a prompt."""
    finish = {"type": "stop", "matched": 1}
    meta = {"id": rid, "finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(prompt)}
    return {"text": "", "output_ids": prompt, "meta_info": meta}


@contextlib.asynccontextmanager
async def gserver(handler):
    """A server whose /generate is `handler`; gives its URL, the bodies that it got, and a client."""
    bodies = []

    async def generate(request):
        bodies.append(await request.json())
        answered = handler(bodies[-1])
        if not inspect.isasyncgen(answered):
            return await answered
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for content in answered:
            await response.write(content)
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = GenerationClient(timeout=5)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies, client
    finally:
        await client.close()
        await runner.cleanup()


def event(content):
    return f"data: {json.dumps(content)}\n\n".encode()


def batch_events(body):
    """One for each prompt of a batch."""
    assert body["stream"]
    assert all(params["stream_interval"] == params["max_new_tokens"] for params in body["sampling_params"])
    prompts = enumerate(zip(body["input_ids"], body["rid"], strict=True))
    return [event({**answer(prompt, rid), "index": index}) for index, (prompt, rid) in prompts]


async def echo(body):
    if isinstance(body["rid"], list):
        return web.Response(body=b"".join([*batch_events(body), b"data: [DONE]\n\n"]), content_type="text/event-stream")
    return web.json_response(answer(body["input_ids"], body["rid"]))


def request(number):
    return GenerateRequest(input_ids=[number, number], rid=f"r{number}", return_logprob=True)


async def test_one_http_request_for_each_group_and_moment():
    async with gserver(echo) as (url, bodies, client):
        siblings = SiblingRequests(client)
        calls = [siblings.generate(group, url, request(10 * group + i)) for group in (1, 2) for i in range(3)]
        replies = await asyncio.gather(*calls)
        assert [r.output_ids for r in replies] == [[n, n] for n in (10, 11, 12, 20, 21, 22)]
        assert sorted(json.dumps(b["rid"]) for b in bodies) == ['["r10", "r11", "r12"]', '["r20", "r21", "r22"]']
        assert (await siblings.generate(1, url, request(7))).output_ids == [7, 7]
        assert bodies[-1]["rid"] == "r7"


async def test_a_sibling_that_is_done_does_not_wait_for_the_others():
    goes_on = asyncio.Event()

    async def one_by_one(body):
        for index, content in enumerate(batch_events(body)):
            if index == 1:  # as SGLang does with the first token, and cut where it may be cut
                yield event(
                    {"text": "", "output_ids": [1], "meta_info": {"id": "r", "finish_reason": None}, "index": 1}
                )
                yield content[:9]
                await goes_on.wait()
                content = content[9:]
            yield content
        yield b"data: [DONE]\n\n"

    async with gserver(one_by_one) as (url, _, client):
        siblings = SiblingRequests(client)
        calls = [asyncio.create_task(siblings.generate(1, url, request(i))) for i in range(3)]
        assert (await asyncio.wait_for(calls[0], 30)).output_ids == [0, 0]
        assert not calls[1].done()
        goes_on.set()
        assert [(await call).output_ids for call in calls[1:]] == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("after", "raised", "text"),
    [
        ([], PeerLost, "broke its answer"),
        ([b"data: [DONE]\n\n"], WireError, "answered 3 prompts with 1 responses"),
        ([event({"error": {"message": "out of memory"}})], PeerError, "out of memory"),
        ([event({**answer([7], "r"), "index": 3})], WireError, "prompt 3 of 3"),
        ([event({**answer([7], "r"), "index": 0})], WireError, "prompt 0 of 3"),
        ([b"data: nonsense\n\n"], WireError, "something else than responses"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], WireError, "something else than responses"),
    ],
)
async def test_what_comes_before_a_failure_counts(after, raised, text):
    async def fail(body):
        for content in [batch_events(body)[0], *after]:
            yield content

    async with gserver(fail) as (url, _, client):
        siblings = SiblingRequests(client)
        first, *others = await asyncio.gather(
            *(siblings.generate(1, url, request(i)) for i in range(3)), return_exceptions=True
        )
        assert first.output_ids == [0, 0]
        for error in others:
            assert isinstance(error, raised)
            assert text in str(error)


async def test_when_the_last_sibling_is_cancelled_so_is_the_request():
    asked, left = asyncio.Event(), asyncio.Event()

    async def hang(body):
        asked.set()
        try:
            await asyncio.sleep(30)
        finally:
            left.set()

    async with gserver(hang) as (url, _, client):
        siblings = SiblingRequests(client)
        waiting = [asyncio.create_task(siblings.generate(1, url, request(i))) for i in range(2)]
        await asyncio.wait_for(asked.wait(), 30)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert len(siblings._sending) == 1
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*siblings._sending, return_exceptions=True)
        assert not siblings._sending
