"""A gserver as a member of a run, against a manager that only answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from streamrl.config import from_dict
from streamrl.errors import ModelError, PeerError
from streamrl.gserver.embedded.scheduler import Scheduler
from streamrl.gserver.server.process import first_weights, serve
from streamrl.transport.control import Heartbeat, HeartbeatReply, Register, RegisterReply
from streamrl.transport.credentials import generation_key
from streamrl.transport.generation import GenerateRequest, GenerationClient
from streamrl.transport.secret import VARIABLE, Secret
from tests.gserver.serving import config_of
from tests.gserver.tiny import make_model, save
from tests.launch.test_export import in_parts
from tests.trainer.models import save_model
from tests.transport.test_control import answer, server

SECRET = "what-this-run-knows-alone"


class Manager:
    """Takes registrations and heartbeats."""

    def __init__(self) -> None:
        self.stop = False
        self.registered: asyncio.Queue[Register] = asyncio.Queue()
        self.heartbeats: asyncio.Queue[Heartbeat] = asyncio.Queue()
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/register":
            self.registered.put_nowait(msgspec.json.decode(await request.read(), type=Register))
            return answer(RegisterReply(policy_version=0, heartbeat_seconds=0.02))
        self.heartbeats.put_nowait(msgspec.json.decode(await request.read(), type=Heartbeat))
        return answer(HeartbeatReply(stop=self.stop, policy_version=0, known=True))

    def heard(self) -> list[Heartbeat]:
        """The heartbeats that nobody has waited for."""
        return [self.heartbeats.get_nowait() for _ in range(self.heartbeats.qsize())]


@pytest.fixture
async def manager(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Manager]:
    monkeypatch.setenv(VARIABLE, SECRET)
    manager = Manager()
    async with server(manager.handle) as manager.url:
        yield manager


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(), tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def joined(
    manager: Manager, folder: Path, **config: Any
) -> AsyncIterator[tuple[Register, asyncio.Task[None], Callable[[], Awaitable[object]]]]:
    """How a gserver has registered, the task that is over when it ends, and a call that generates there."""
    serving = asyncio.create_task(serve(config_of(**config), manager_url=manager.url, index=3, model_dir=folder))
    member = await asyncio.wait_for(manager.registered.get(), 20)
    key = generation_key(config_of(), Secret(SECRET, origin="here"))
    async with GenerationClient(timeout=20, key=key) as client:
        yield member, serving, lambda: client.generate(member.address, GenerateRequest(input_ids=[1, 2, 3]))


@pytest.mark.parametrize("engine", ["embedded", "simulated"])
async def test_joins_serves_reports_and_leaves(engine: str, manager: Manager, folder: Path) -> None:
    async with joined(manager, folder, engine=engine) as (member, serving, generate):
        digest = config_of(engine=engine).digest()
        assert (member.role, member.index, member.config_digest) == ("gserver", 3, digest)
        await generate()
        while (beat := await asyncio.wait_for(manager.heartbeats.get(), 20)).stats["requests_total"] != 1:
            pass
        of_generation = {"tokens_generated_total", "prompt_tokens_total", "requests_total", "weight_updates_total"}
        of_time = {"busy_seconds_total", "slot_seconds_total", "pause_seconds_total"}
        assert set(beat.stats) >= {"running", "queued", *of_generation, *of_time}
        manager.stop = True
        await asyncio.wait_for(serving, 20)


async def test_a_hung_engine_is_told_and_ends_the_gserver(
    manager: Manager, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()
    async with joined(manager, folder, limits={"stuck_seconds": 0.5}) as (_, serving, generate):
        await generate()
        await asyncio.sleep(1.0)
        assert not serving.done(), "one that waits for work does not hang"
        monkeypatch.setattr(Scheduler, "step", lambda self: let_go.wait())
        try:
            with pytest.raises(PeerError, match=r"no step for 0\.5 s"):
                await generate()
            with pytest.raises(ModelError, match=r"no step for 0.5 s \(limits.stuck_seconds\)"):
                await asyncio.wait_for(serving, 20)
        finally:
            let_go.set()
    assert "let_go.wait()" in caplog.text
    beats = manager.heard()
    assert any("no step for 0.5 s" in beat.error for beat in beats)
    assert max(beat.stats.get("step_seconds", 0.0) for beat in beats) > 0.25


async def test_a_dead_engine_is_told_and_ends_the_gserver(
    manager: Manager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(manager, folder) as (_, serving, generate):
        monkeypatch.setattr(Scheduler, "_next_batch", lambda self: 1 / 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            await generate()
        with pytest.raises(ModelError, match="ZeroDivisionError"):
            await asyncio.wait_for(serving, 20)
    assert any("ZeroDivisionError" in beat.error for beat in manager.heard())


@pytest.mark.parametrize("engine", ["sglang", "embedded"])
async def test_sglang_gets_what_others_read_in_parts_as_an_export_for_as_long_as_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("STREAMRL_CACHE", str(cache))
    checkpoints = [save_model(tmp_path / str(seed), "llama", seed=seed) for seed in range(2)]
    for checkpoint in checkpoints:
        in_parts(checkpoint)
    config = from_dict({"gserver": {"engine": engine}})
    async with first_weights(config, index=0, model_dir=checkpoints[0]) as folder:
        async with first_weights(config, index=1, model_dir=checkpoints[1]):
            assert folder.is_dir()
        assert (folder == checkpoints[0]) == (engine == "embedded")
    async with first_weights(config, index=0, model_dir=checkpoints[1]):
        assert folder.is_dir() == (engine == "embedded")
