"""Tiny components with the entries of the real ones, to try the launcher with real processes.

What each does is told by `config.data.args`: `{"rollout": "die"}` and so on; see `_act`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
from aiohttp import web

from streamrl.config import Config
from streamrl.errors import ModelError, RunStopped, StreamRLError
from streamrl.records.metrics import StepReport
from streamrl.transport.control import Done, FinishRun, LedgerStatus, ProcessStatus, Silence, Status

log = logging.getLogger("streamrl.standin")

COMPONENTS = {
    role: f"tests.launch.standins:{role}" for role in ("checkpoint", "controller", "gserver", "model_worker", "rollout")
}


def checkpoint(config: Config) -> Path:
    action = config.data.args.get("checkpoint")
    if action == "fail":
        raise ModelError("no such model: nowhere")
    while action == "await members" and len(psutil.Process(os.getppid()).children()) < 4:
        time.sleep(0.05)
    return config.run_dir


async def controller(
    config: Config, *, host: str, port: int, advertise: str, died: str, on_ready: Callable[[str], None]
) -> None:
    """Answers /status; finishes the run once all are there, unless it is to do something else."""
    over = asyncio.Event()
    state = {"state": "running", "message": ""}
    action = config.data.args.get("controller", "finish")
    began = time.time()

    async def status(request: web.Request) -> web.Response:
        body = Status(
            run=config.run.name,
            state=state["state"],  # type: ignore[arg-type]
            message=state["message"],
            ledger=LedgerStatus(3, 4, 10, 6, 3, 2, 0, 0, 0, 0, 5),
            processes=[
                ProcessStatus(role, index, "", pid, "here", 0.1, {}, "", "live") for role, index, pid in joined(config)
            ],
            last_step=StepReport(step=3, time=began, metrics={"reward_mean": 0.5}, token_ages={0: 10}),
            publication={},
        )
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def wait(request: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    async def silence(request: web.Request) -> web.Response:
        await over.wait()
        body = Silence(changes=0, processes=[], over=True)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def fail(request: web.Request) -> web.Response:
        found = msgspec.json.decode(await request.read(), type=FinishRun)
        log.error("told that the run failed: %s", found.error)
        return web.Response(body=msgspec.json.encode(Done()), content_type="application/json")

    app = web.Application()

    given: Counter[str] = Counter()

    async def place(request: web.Request) -> web.Response:
        role = (await request.json())["role"]
        given[role] += 1
        return web.json_response({"index": given[role] - 1})

    drained = asyncio.Event()

    async def drain(request: web.Request) -> web.Response:
        if action != "until drained":
            raise web.HTTPNotFound
        drained.set()
        return web.Response(body=msgspec.json.encode(Done()), content_type="application/json")

    app.add_routes(
        [
            *(web.get("/status", status), web.post("/place", place), web.get("/wait", wait)),
            *(web.get("/silent", silence), web.post("/finish_run", fail), web.post("/drain", drain)),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    on_ready(f"http://{host}:{site._server.sockets[0].getsockname()[1]}")  # type: ignore[union-attr]
    _note(config, "controller")
    try:
        if action == "finish":
            while (  # noqa: ASYNC110
                not (config.run_dir / "model_worker0.pid").exists()  # the last command of some tests
                or len(list(config.run_dir.glob("*.pid"))) < 4
            ):
                await asyncio.sleep(0.05)
            state.update(state="finished", message="3 steps are done")
        elif action == "fail":
            state.update(state="failed", message="gserver/0: ModelError: out of memory")
        elif action == "until drained":
            await drained.wait()
            state.update(state="stopped", message="stopped on request after step 3")
        else:
            await _act(config, "controller", 0)
        over.set()
        # as long as the real one's launcher may need to ask why the run failed
        await asyncio.sleep(2.0 if action == "fail" else 0.3)
    finally:
        await runner.cleanup()
    if action == "fail":
        raise StreamRLError(f"the run has failed: {state['message']}")
    if state["state"] == "stopped":
        raise RunStopped(state["message"])


async def gserver(config: Config, *, manager_url: str, index: int = 0, model_dir: Path, advertise: str) -> None:
    await _member(config, "gserver", manager_url, index)


async def model_worker(config: Config, *, manager_url: str, index: int = 0, model_dir: Path, advertise: str) -> None:
    await _member(config, "model_worker", manager_url, index)


async def rollout(config: Config, *, manager_url: str, index: int = 0, model_dir: Path, advertise: str) -> None:
    await _member(config, "rollout", manager_url, index)


async def _member(config: Config, role: str, manager_url: str, index: int) -> None:
    import aiohttp

    _note(config, f"{role}{index}")
    await _act(config, role, index)
    async with aiohttp.ClientSession() as session, session.get(f"{manager_url}/wait"):
        pass
    if config.data.args.get("controller") == "fail" and role == "gserver":
        raise ModelError("out of memory")


def joined(config: Config) -> list[tuple[Any, int, int]]:
    """Role, number and id of the processes that have joined, as the controller has them."""
    found = [
        (role, int(file.stem.removeprefix(role)), int(file.read_text() or 0))
        for role in ("gserver", "rollout")
        for file in config.run_dir.glob(f"{role}*.pid")
        if config.data.args.get(role) != "die-first"
    ]
    return found or [("gserver", 0, 1)]


async def _act(config: Config, role: str, index: int) -> None:
    """Misbehave as told."""
    count = _starts(config, role)
    action = config.data.args.get(role, "work")
    if action in ("die", "die-first"):
        log.error("%s %d: something broke", role, index)
        os._exit(3)
    if action == "raise":
        raise ModelError(f"the model of {role} is broken")
    if action == "die-once" and count == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stubborn":
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: log.warning("no"))
        time.sleep(60)  # noqa: ASYNC251
    if action == "shout":
        log.info("%s %d works", role, index)
    if action == "wait":
        await asyncio.Event().wait()


def _starts(config: Config, role: str) -> int:
    """How often processes of the role were started."""
    file = config.run_dir / f"{role}-starts.txt"
    return len(file.read_text().split()) if file.exists() else 0


def _note(config: Config, name: str) -> None:
    """Leave a file that tells this process's id."""
    (config.run_dir / f"{name}.pid").write_text(str(os.getpid()))
    with (config.run_dir / f"{name.rstrip('0123456789')}-starts.txt").open("a") as file:
        file.write(f"{os.getpid()}\n")
