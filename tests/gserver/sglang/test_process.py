"""How an SGLang server is started, watched and ended, with a small program in the place of SGLang."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch

from streamrl.config import Config
from streamrl.errors import DeadlineExceeded, ModelError, PeerLost, ProcessDied
from streamrl.gserver.server import monitor, serving
from streamrl.gserver.server.process import running
from streamrl.gserver.sglang.received import ADAPTERS, CHECKER, UPDATER
from streamrl.gserver.sglang.serving import reserved_port
from streamrl.transport.credentials import GserverKeys
from tests.gserver.serving import config_of
from tests.gserver.tiny import make_model, save
from tests.processes import lives

PRETENDED = Path(__file__).parent / "pretended"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PRETENDED), *sys.path]))


def sglang_config(
    *,
    args: tuple[str, ...] = (),
    stuck_seconds: float = 60.0,
    update_seconds: float = 20.0,
    start_seconds: float = 60.0,
    **sglang: Any,
) -> Config:
    limits = {"stuck_seconds": stuck_seconds, "update_seconds": update_seconds, "start_seconds": start_seconds}
    return config_of(engine="sglang", limits=limits, sglang={"args": list(args), **sglang})


def started(config: Config, folder: Path) -> AbstractAsyncContextManager[Any]:
    return running(config, index=0, model_dir=folder)


async def ask(url: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.json(content_type=None)


async def until_gone(pids: list[int]) -> None:
    """Wait for processes that are not ours to be told of."""
    async with asyncio.timeout(20):
        while any(lives(pid) for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_it_serves_reports_and_leaves_nothing(folder: Path) -> None:
    async with started(sglang_config(args=("--chunked-prefill-size=64",)), folder) as (served, url):
        told = await ask(url)
        async with asyncio.timeout(20):
            while served.stats()["running"] == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        stats = served.stats()
    assert f"--model-path={folder}" in told["argv"]
    assert told["argv"][-1] == "--chunked-prefill-size=64"
    assert told["kernels"]
    assert told["starts_by"] == "fork"
    assert told["group"] == told["worker"]["group"] == str(("gloo", timedelta(seconds=20), -1))
    assert (served.name, stats["running"], stats["tokens_generated_total"]) == ("sglang", 3, 40)
    await until_gone(told["pids"])


async def test_processes_that_it_starts_afresh_as_with_a_gpu_are_changed_like_itself(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they end with it. Nothing takes the place of SGLang's kernels there."""
    (tmp_path / "sgl_kernel.py").write_text("__version__ = 'installed'\nany_operator = print\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setattr(serving, "resolve_device", lambda *_, **__: torch.device("cuda", 0))
    async with started(sglang_config(), folder) as (_, url):
        told = await ask(url)
    assert (told["kernels"], told["starts_by"]) == ("installed", "spawn")
    assert told["worker"]["group"] == str(("gloo", timedelta(seconds=20), -1))
    assert told["worker"]["opens_store"] == "__mp_main__"
    assert told["worker"]["patched"] == sorted((UPDATER, CHECKER, ADAPTERS))
    await until_gone(told["pids"])


async def test_it_gets_its_keys_unseen_and_has_only_the_calls_of_a_run(folder: Path) -> None:
    keys = GserverKeys("for-those-who-generate", "for-the-manager-alone")
    async with running(sglang_config(), index=0, model_dir=folder, keys=keys) as (_, url):
        told = await ask(url)
        assert told["argv"][-2:] == [f"--api-key={keys.generation}", f"--admin-api-key={keys.control}"]
        assert not set(keys) & set(told["environment"].values())
        seen = [word for pid in told["pids"] for word in psutil.Process(pid).cmdline()]
        assert not any(key in word for key in keys for word in seen)
        assert told["paths"] == ["/generate", "/update_weights_from_disk", "/health"]


async def test_its_death_is_told_with_its_last_words(folder: Path) -> None:
    async with started(sglang_config(), folder) as (served, url):
        pids = (await ask(url))["pids"]
        failing = asyncio.create_task(served.failed())
        with pytest.raises(aiohttp.ClientError):
            await ask(f"{url}/die")
        with pytest.raises(ProcessDied, match=r"(?s)exit code 7.*the last words"):
            await asyncio.wait_for(failing, 20)
        await until_gone(pids)


async def test_one_that_answers_nothing_says_where_it_hangs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(monitor, "FIGURES_SECONDS", 0.1)
    async with started(sglang_config(stuck_seconds=3.0), folder) as (served, url):
        pids = (await ask(url))["pids"]
        failing = asyncio.create_task(served.failed())
        await asyncio.sleep(0.5)
        time.sleep(4)  # noqa: ASYNC251 - it is the gserver that stands still, and nothing is wrong with the server
        await asyncio.sleep(1)
        assert not failing.done()
        unanswered = asyncio.create_task(ask(f"{url}/stall"))
        with pytest.raises(PeerLost, match=r"has not replied for \d+ s"):
            await asyncio.wait_for(failing, 30)
        unanswered.cancel()
        await asyncio.gather(unanswered, return_exceptions=True)
    assert "in serve_forever" in caplog.text  # the server
    assert "in schedule" in caplog.text  # and the process that it started
    await until_gone(pids)


async def test_one_whose_scheduler_hangs_is_lost_though_its_front_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in {"ANSWER_SECONDS": 1.0, "FIGURES_SECONDS": 0.2, "SCHEDULER_SECONDS": 0.2}.items():
        monkeypatch.setattr(monitor, name, seconds)
    config = sglang_config(stuck_seconds=1.0, update_seconds=1.0)
    async with started(config, folder) as (served, url):
        failing = asyncio.create_task(served.failed())
        await asyncio.sleep(3)  # longer than a hung one is waited for
        assert not failing.done()
        pids = (await ask(f"{url}/stall-scheduler"))["pids"]
        with pytest.raises(PeerLost, match=r"the scheduler of the SGLang server at .* has not replied for \d+ s"):
            await asyncio.wait_for(failing, 30)
        assert (await ask(url))["pids"] == pids  # the front does
    assert "in schedule" in caplog.text
    await until_gone(pids)


async def test_a_server_that_cannot_start(folder: Path) -> None:
    with pytest.raises(ProcessDied, match=r"(?s)exit code 1.*not good enough"):
        async with started(sglang_config(args=("--fail",)), folder):
            pass
    with pytest.raises(ModelError, match=r"gserver\.sglang\.python"):
        async with started(sglang_config(python="/no/such/python"), folder):
            pass
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="start_seconds"):
        async with started(sglang_config(args=("--hang",), start_seconds=1.0), folder):
            pass
    assert time.monotonic() - began < 15


async def test_it_ends_with_a_gserver_that_is_killed(folder: Path) -> None:
    gserver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.gserver.sglang.gserver", str(folder)), stdout=asyncio.subprocess.PIPE
    )
    assert gserver.stdout is not None
    url = (await asyncio.wait_for(gserver.stdout.readline(), 120)).decode().strip()
    try:
        pids = (await ask(url))["pids"]
    finally:
        gserver.send_signal(signal.SIGKILL)
        await gserver.wait()
    await until_gone(pids)


IP_LOCAL_PORT_RANGE = 51
"""Linux's number for the option: between which ports the system chooses one for this socket."""


def any_port_of(only: int) -> int:
    """What the system gives one who asks for any port, and may reuse addresses, when it may choose `only` this one."""
    with socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", only << 16 | only))
        except OSError:
            pytest.skip("this system cannot be told from which ports to choose")
        asking.bind(("127.0.0.1", 0))
        found: int = asking.getsockname()[1]
        return found


def test_a_reserved_port_is_for_whoever_asks_for_it_by_its_number() -> None:
    with reserved_port("127.0.0.1") as given_back:
        port = given_back.getsockname()[1]
    assert any_port_of(port) == port
    with reserved_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            any_port_of(port)
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(("127.0.0.1", port), timeout=20),
        ):
            server.settimeout(20)
            server.accept()[0].close()
