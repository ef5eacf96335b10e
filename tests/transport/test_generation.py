"""The client of SGLang's API, against the shapes in which SGLang answers."""

from __future__ import annotations

import pytest
from aiohttp import web

from streamrl.errors import WireError
from streamrl.transport.generation import GenerationClient, Outcome
from tests.transport.test_control import server


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
    client = GenerationClient(timeout=5.0)
    try:
        async with server(lambda request: reply(answer)) as url:
            assert await client.update(url, "/it") == outcome
    finally:
        await client.close()


async def test_a_question_is_never_answered_with_nothing() -> None:
    client = GenerationClient(timeout=5.0)
    try:
        async with server(lambda request: reply(b"")) as url:
            with pytest.raises(WireError, match="ModelInfo"):
                await client.model_info(url)
    finally:
        await client.close()


async def reply(content: bytes) -> web.Response:
    return web.Response(body=content)
