"""Adapters to servers that have no stage but load them by name, as SGLang does: what they are asked for, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.checksum import tensor_sums
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.updates import calls
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.trainer.worker.publisher import Publisher
from streamrl.transport.generation import GenerationClient
from tests.gserver.harness import Run, live_gservers, managed, small_config
from tests.gserver.scripted import ScriptedGserver, scripted
from tests.weights import FixedWeights, cpu_publisher

ADAPTER = {"base_model.model.layer.lora_A.weight": torch.ones(2, 3)}
SUMS = {name: tensor_sums(tensor) for name, tensor in ADAPTER.items()}


@asynccontextmanager
async def publishing(folder: Path, *gservers: ScriptedGserver) -> AsyncIterator[tuple[Run, Publisher]]:
    """A run with `gservers`, and its publisher of adapters."""
    config = small_config(
        folder,
        model={"lora": {"rank": 2}},
        gserver={"engine": "sglang", "count": len(gservers)},
        limits={"update_seconds": 5.0},
    )
    async with managed(config) as run:
        for gserver in gservers:
            gserver.sums = SUMS
        await run.join(*gservers, workers=0)
        publisher = cpu_publisher(config, run.client)
        for gserver in gservers:
            gserver.calls.clear()
        yield run, publisher
        publisher.close()


async def publish(publisher: Publisher, version: int) -> Any:
    return await publisher.publish(version, FixedWeights(ADAPTER))


def changes(gserver: ScriptedGserver) -> list[str]:
    asked = ("/server_info", "/model_info", "/generate")
    return [path for path in gserver.calls if path not in asked]


async def test_an_adapter_is_loaded_beside_the_others_and_nobody_is_paused(tmp_path: Path) -> None:
    async with scripted(2, staged=False, version="0") as gservers, publishing(tmp_path, *gservers) as (_, publisher):
        for version in (1, 2):
            published = await publish(publisher, version)
            assert (published.pause_seconds, published.attempts) == (0.0, 1)
        for gserver in gservers:
            assert changes(gserver) == ["/load_lora_adapter", "/weights_checker", "/update_weight_version"] * 2
            assert gserver.weight_version == "2"
            assert list(gserver.adapters) == ["streamrl-v1", "streamrl-v2"]
            assert {Path(folder).name for folder in gserver.adapters.values()} == {"v000001", "v000002"}


async def test_another_adapter_than_was_trained_is_served_by_nobody(tmp_path: Path) -> None:
    async with (
        scripted(2, staged=False, version="0") as (good, bad),
        publishing(tmp_path, good, bad) as (run, publisher),
    ):
        bad.sums = dict.fromkeys(SUMS, "another")
        assert (await publish(publisher, 1)).attempts == 2
        assert (good.weight_version, bad.weight_version) == ("1", "0")
        assert live_gservers(await run.client.status()) == {0}
        assert "/pause_generation" not in good.calls


async def test_one_that_comes_late_loads_the_adapter_that_is_served(tmp_path: Path) -> None:
    async with (
        scripted(2, staged=False, version="0") as (early, late),
        publishing(tmp_path, early) as (run, publisher),
    ):
        await publish(publisher, 1)
        late.sums = SUMS
        await run.register("gserver", 1, address=late.url, pid=200)
        await run.manager.resync_needed()
        await publisher.publish(1, FixedWeights(ADAPTER), resync=True)
        assert live_gservers(await run.client.status()) == {0, 1}
        assert list(late.adapters) == ["streamrl-v1"]
        assert late.weight_version == "1"


async def test_old_ones_are_unloaded_when_no_request_can_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(calls.time, "monotonic", lambda: now)
    client = GenerationClient(timeout=5.0)
    async with scripted(staged=False) as (peer,):
        peer.adapters["its owner's"] = "/another"
        asked = WeightCalls(client, timeout=5.0, request_seconds=10.0)
        gserver = Gserver(0, peer.url)

        async def serve(version: int) -> set[str]:
            await asked.load_adapter(gserver, f"/v{version}", name=f"streamrl-v{version}")
            asked.unload_old_adapters(gserver, serves=f"streamrl-v{version}")
            await asyncio.gather(*asked._background, return_exceptions=True)
            return {name.removeprefix("streamrl-") for name in peer.adapters} - {"its owner's"}

        assert await serve(1) == {"v1"}
        assert await serve(2) == {"v1", "v2"}
        now = 109.0
        assert await serve(3) == {"v1", "v2", "v3"}
        now = 111.0  # requests have named none of the first for more than ten seconds
        assert await serve(4) == {"v2", "v3", "v4"}
        assert "its owner's" in peer.adapters
        monkeypatch.setattr(calls, "MOST_OLD_ADAPTERS", 2)
        assert await serve(5) == {"v3", "v4", "v5"}
        peer.faults["/unload_lora_adapter"] = ["error"]
        assert await serve(6) == {"v3", "v4", "v5", "v6"}, "what was not unloaded is seen again with the next"
        assert await serve(7) == {"v5", "v6", "v7"}
        await asked.close()
    await client.close()
