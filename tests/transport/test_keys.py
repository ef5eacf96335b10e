"""API keys: read from the environment, shown by clients, asked for by the manager and the gservers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from streamrl.errors import ConfigError, PeerError
from streamrl.gserver.manager import process
from streamrl.transport.keys import admits, is_loopback, read_key
from streamrl.transport.manager_client import ControlClient
from tests.gserver.harness import managed, small_config

KEY = "0123456789abcdef-key"
VARIABLE = "TEST_MANAGER_KEY"


def test_a_key_that_is_not_set_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_key("", setting="manager.api_key_env") == ""
    for wrong in (None, "", "short", "with spaces 0123456789", "ü" * 20):
        if wrong is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f'manager.api_key_env = "{VARIABLE}"') as error:
            read_key(VARIABLE, setting="manager.api_key_env")
        assert not wrong or wrong not in str(error.value)
    monkeypatch.setenv(VARIABLE, f"{KEY}\n")
    assert read_key(VARIABLE, setting="manager.api_key_env") == KEY


def test_only_the_whole_key_admits() -> None:
    assert admits("", None)
    assert admits(KEY, f"Bearer {KEY}")
    for shown in (None, "", KEY, f"Bearer {KEY}x", f"bearer {KEY}", f"Bearer {KEY[:-1]}", "Bearer ü"):
        assert not admits(KEY, shown)


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))


async def test_the_manager_answers_only_those_who_show_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    config = small_config(tmp_path, manager={"api_key_env": VARIABLE})
    assert config.digest() == small_config(tmp_path).digest()
    async with managed(config) as run:
        with pytest.raises(PeerError, match=f"manager.api_key_env names: set the environment variable {VARIABLE}") as e:
            await run.client.status()
        assert e.value.status == 401
        assert KEY not in str(e.value)
        knowing = ControlClient(run.url, key=KEY)
        assert (await knowing.status()).state == "joining"
        await knowing.close()
        async with aiohttp.ClientSession() as session, session.get(f"{run.url}/health") as response:
            assert response.status == 200


async def test_a_manager_that_others_can_reach_without_a_key_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    for settings, warns in (({}, True), ({"api_key_env": VARIABLE}, False)):
        caplog.clear()
        ready = asyncio.Event()
        serving = asyncio.create_task(
            process.serve(
                small_config(tmp_path, manager=settings),
                host="0.0.0.0",
                port=0,
                on_ready=lambda url, ready=ready: ready.set(),
            )
        )
        await asyncio.wait_for(ready.wait(), 30)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert ("without a key" in caplog.text) == warns
        assert KEY not in caplog.text
