"""The questions to a running SGLang server end when they should."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from streamrl.gserver.server import monitor as module
from streamrl.gserver.server.monitor import monitoring
from streamrl.gserver.sglang.command import SGLANG


@pytest.mark.parametrize("late", [0.0, 0.01, 0.1])
async def test_figures_end_although_an_answer_is_overdue_in_the_same_moment(
    late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that stood still finds its deadlines past, and whoever cancels at once with them."""
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        asked.set()
        await never.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/metrics", hang)
    runner = web.AppRunner(app, shutdown_timeout=0.05, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with monitoring(
            SGLANG, f"http://{host}:{port}", key="", stuck_seconds=60.0, update_seconds=60.0
        ) as monitor:
            figures = asyncio.create_task(monitor.poll_figures())
            began = time.monotonic()
            await asyncio.wait_for(asked.wait(), 10)
            asyncio.get_running_loop().call_later(0.3 + late, figures.cancel)
            time.sleep(max(0.0, began + 0.6 - time.monotonic()))  # noqa: ASYNC251 - nothing else is to run
            await asyncio.wait({figures}, timeout=5)
            assert figures.cancelled()
    finally:
        never.set()
        await runner.cleanup()
