"""Siblings' requests travel as one, and each gets its own reply."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from streamrl.errors import PeerError, WireError
from streamrl.rollout.siblings import SiblingRequests
from streamrl.transport.generation import GenerateRequest, GenerationClient


def answer(prompt, rid):
    """Echo a prompt."""
    finish = {"type": "stop", "matched": 1}
    meta = {"id": rid, "finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(prompt)}
    return {"text": "", "output_ids": prompt, "meta_info": meta}


@contextlib.asynccontextmanager
async def gserver(handler):
    """A server whose /generate is `handler`; answers its URL and the bodies that it got."""
    bodies = []

    async def generate(request):
        bodies.append(await request.json())
        return await handler(bodies[-1])

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


async def echo(body):
    if isinstance(body["rid"], list):
        return web.json_response([answer(p, r) for p, r in zip(body["input_ids"], body["rid"], strict=True)])
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


async def test_all_hear_of_a_failure():
    async def refuse(body):
        return web.json_response({"error": {"message": "no room"}}, status=503)

    async with gserver(refuse) as (url, _, client):
        siblings = SiblingRequests(client)
        calls = [siblings.generate(1, url, request(i)) for i in range(3)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, PeerError)
            assert "no room" in str(error)


async def test_too_few_answers_are_refused():
    async def lose_one(body):
        return web.json_response([answer(p, "r") for p in body["input_ids"][1:]])

    async with gserver(lose_one) as (url, _, client):
        siblings = SiblingRequests(client)
        calls = [siblings.generate(1, url, request(i)) for i in range(3)]
        with pytest.raises(WireError, match="answered 3 prompts with 2 responses"):
            await asyncio.gather(*calls)


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
        await asyncio.wait_for(asked.wait(), 5)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert len(siblings._asking) == 1
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*siblings._asking, return_exceptions=True)
        assert not siblings._asking
