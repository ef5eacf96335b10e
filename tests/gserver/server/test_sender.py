"""What a gserver offers to others, over real HTTP. That it arrives is tested with real processes (`faults/`)."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.gserver.serving import Client, serving
from tests.gserver.tiny import make_model, prompt, save, weights_of

GROUP = {"group_name": "catch-up"}
OFFER = GROUP | {"version": "7"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(seed=0), tmp_path_factory.mktemp("model"))


async def refusal(client: Client, path: str, body: Any, *, status: int = 400) -> str:
    answer = await client.post(path, body, status=status)
    return str(answer["error"]["message"])


async def test_an_offer_names_every_weight_and_where_to_meet(folder: Path) -> None:
    async with serving(folder) as client:
        await client.post("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
        offered = await client.post("/offer_weights", OFFER)
        specs = [spec for bucket in offered["senders"][0]["buckets"] for spec in bucket]
        assert {spec["name"]: tuple(spec["shape"]) for spec in specs} == {
            name: tuple(tensor.shape) for name, tensor in weights_of(make_model()).items()
        }
        assert {spec["dtype"] for spec in specs} == {"float32"}
        with socket.create_connection((offered["senders"][0]["address"], offered["senders"][0]["port"]), timeout=5):
            pass
        assert "exists already" in await refusal(client, "/offer_weights", OFFER)
        await client.post("/destroy_weights_update_group", GROUP)
        assert "no weight group catch-up" in await refusal(client, "/destroy_weights_update_group", GROUP)
        assert "nothing is offered" in await refusal(client, "/send_weights", GROUP)


async def test_another_version_than_is_served_is_not_offered(folder: Path) -> None:
    async with serving(folder) as client:
        message = await refusal(client, "/offer_weights", OFFER)
        assert message == "weights 7 were asked for, and 'default' are served here"
        assert "nothing is offered" in await refusal(client, "/send_weights", GROUP)


async def test_a_simulated_engine_offers_nothing(folder: Path) -> None:
    async with serving(folder, engine="simulated") as client:
        assert (await client.get("/server_info"))["sends_weights"] is False
        assert "no weights to send" in await refusal(client, "/offer_weights", OFFER)


async def test_an_offer_that_nobody_came_back_for_is_forgotten(folder: Path) -> None:
    async with serving(folder) as client:
        await client.post("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
        await client.post("/offer_weights", OFFER)
        await client.post("/offer_weights", OFFER | {"group_name": "another"})
        assert "nothing is offered" in await refusal(client, "/send_weights", GROUP)
        await client.post("/destroy_weights_update_group", {"group_name": "another"})


async def test_nobody_comes_to_fetch_the_weights_and_generation_goes_on(folder: Path) -> None:
    async with serving(folder, weights={"timeout_seconds": 1.0}) as client:
        await client.post("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
        await client.post("/offer_weights", OFFER)
        sending = asyncio.create_task(refusal(client, "/send_weights", GROUP, status=500))
        body = {"input_ids": prompt(5), "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
        assert (await client.post("/generate", body))["meta_info"]["completion_tokens"] == 5
        assert not sending.done()
        said = await sending
        assert "rank 0 of 2 (gloo at " in said
        assert "could not meet the others" in said
        await client.post("/destroy_weights_update_group", GROUP)
        await client.post("/offer_weights", OFFER)  # and it may be tried again
