"""The questions to a running SGLang server end when they should."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from streamrl.gserver.server import monitor as module
from streamrl.gserver.server.monitor import monitoring
from streamrl.gserver.sglang.command import SGLANG
from tests.transport.test_control import server


@pytest.mark.parametrize("late", [0.0, 0.01, 0.1])
async def test_figures_end_although_an_answer_is_overdue_in_the_same_moment(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that stood still finds its deadlines past, and whoever cancels at once with them."""
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    asked = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        return web.Response()

    async with (
        server(hang) as url,
        monitoring(SGLANG, url, key="", stuck_seconds=60.0, update_seconds=60.0) as monitor,
    ):
        figures = asyncio.create_task(monitor.poll_figures())
        began = time.monotonic()
        await asyncio.wait_for(asked.wait(), 10)
        asyncio.get_running_loop().call_later(0.3 + late, figures.cancel)
        time.sleep(max(0.0, began + 0.6 - time.monotonic()))  # noqa: ASYNC251 - nothing else is to run
        await asyncio.wait({figures}, timeout=5)
        assert figures.cancelled()
