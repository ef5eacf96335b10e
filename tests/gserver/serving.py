"""A gserver's HTTP server in the test's own event loop, and a plain client for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from streamrl.config import Config, from_dict
from streamrl.gserver.server.engine import Engine
from streamrl.gserver.server.process import running


class Client:
    """Raw JSON, so that the tests see what goes over the wire."""

    def __init__(self, session: aiohttp.ClientSession, url: str, engine: Engine) -> None:
        self.session = session
        self.url = url
        self.engine = engine

    async def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        async with self.session.post(self.url + path, json={} if body is None else body) as response:
            content = await response.json()
            assert response.status == status, content
            return content

    async def get(self, path: str, *, status: int = 200) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == status
            content = await response.read()
            return json.loads(content) if content else None

    async def until(self, **wanted: float) -> None:
        """Wait until the engine's figures are `wanted`: an abort or an arrival has no other sign."""
        async with asyncio.timeout(20):
            while any(self.engine.stats()[name] != value for name, value in wanted.items()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def events(self, body: Any) -> AsyncIterator[Any]:
        """Parsed server-sent events; `[DONE]` as None."""
        async with self.session.post(self.url + "/generate", json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            async for line in response.content:
                if line.strip():
                    assert line.startswith(b"data: ")
                    data = line.removeprefix(b"data: ").strip()
                    yield None if data == b"[DONE]" else json.loads(data)


@asynccontextmanager
async def serving(folder: Path, *, weights: Mapping[str, Any] | None = None, **gserver: Any) -> AsyncIterator[Client]:
    """A started gserver on `folder`, with settings of the sections [weights] and [gserver]."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        running(config_of(weights=weights, **gserver), index=0, model_dir=folder) as (engine, url),
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        yield Client(session, url, engine)


def config_of(
    *, weights: Mapping[str, Any] | None = None, limits: Mapping[str, float] | None = None, **gserver: Any
) -> Config:
    return from_dict(
        {
            "run": {"device": "cpu"},
            "gserver": {"dtype": "float32", "max_running": 8, "max_context": 1024, **gserver},
            "data": {"max_prompt_tokens": 100},
            "weights": weights or {},
            "limits": {"update_seconds": 20.0, **(limits or {})},
        }
    )
