"""The client of SGLang's API, against the shapes in which SGLang answers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web

from streamrl.errors import WireError
from streamrl.transport.generation import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    GenerationClient,
    MetaInfo,
    Outcome,
    StreamPart,
)
from tests.transport.test_control import Handler, server


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b'{"success": false, "message": "no"}', Outcome(success=False, message="no")),
        (b'{"status": "ok", "message": "paused"}', Outcome(message="paused")),
        (b"", Outcome()),
    ],
    ids=["an update", "a pause", "an abort"],
)
async def test_every_way_in_which_a_change_is_answered(answer: bytes, outcome: Outcome) -> None:
    async with server(lambda request: reply(answer)) as url, GenerationClient(timeout=5.0) as client:
        assert await client.update(url, "/it") == outcome


async def test_a_question_is_never_answered_with_nothing() -> None:
    async with server(lambda request: reply(b"")) as url, GenerationClient(timeout=5.0) as client:
        with pytest.raises(WireError, match="ModelInfo"):
            await client.model_info(url)


def streaming(*parts: StreamPart, piece: int) -> Handler:
    """A server that answers with an event for each part, written in pieces of so many bytes."""
    content = b"".join(b"data: " + part + b"\n\n" for part in (*map(msgspec.json.encode, parts), b"[DONE]"))

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for begin in range(0, len(content), piece):
            await response.write(content[begin : begin + piece])
            await asyncio.sleep(0)
        return response

    return stream


def part(index: int, *, experts: str | None = None) -> StreamPart:
    meta = MetaInfo(id=str(index), finish_reason=FinishReason("stop"), routed_experts=experts)
    return StreamPart(index=index, output_ids=[index], meta_info=meta)


async def test_a_large_event_takes_time_by_its_length_alone() -> None:
    """With routed experts one response may have tens of megabytes, which come in hundreds of pieces."""
    experts = "A" * (48 * 2**20)
    replies: dict[int, GenerateReply] = {}
    async with (
        server(streaming(part(1, experts=experts), part(0), piece=2**16)) as url,
        GenerationClient(timeout=10.0) as client,
    ):
        await client.generate_batch(url, [GenerateRequest(input_ids=[1])] * 2, replies.__setitem__)
    assert [replies[index].output_ids for index in (0, 1)] == [[0], [1]]
    assert replies[1].meta_info.routed_experts == experts


@pytest.mark.parametrize("piece", [1, 2, 3, 100, 2**20])
async def test_events_are_found_however_they_are_cut(piece: int) -> None:
    replies: dict[int, GenerateReply] = {}
    async with server(streaming(*map(part, range(3)), piece=piece)) as url, GenerationClient(timeout=20.0) as client:
        await client.generate_batch(url, [GenerateRequest(input_ids=[1])] * 3, replies.__setitem__)
    assert [(index, reply.meta_info.id) for index, reply in replies.items()] == [(0, "0"), (1, "1"), (2, "2")]


async def reply(content: bytes) -> web.Response:
    return web.Response(body=content)
