"""Adapters that are published to a real SGLang server: each request is computed with the one that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.config import LoraConfig, overridden
from streamrl.errors import PeerError, PublicationError
from streamrl.lora import adapter_settings
from streamrl.models import ensure_checkpoint
from streamrl.trainer.worker.publisher import Carriers, Publisher
from streamrl.trainer.worker.weight_files import WeightFiles
from streamrl.transport.generation import (
    NO_ADAPTER,
    GenerateReply,
    GenerateRequest,
    GenerationClient,
    LoadedAdapters,
    ModelCards,
    SamplingParams,
    UnloadLoraAdapter,
    adapter_name,
)
from streamrl.transport.keys import control_key, generation_key
from streamrl.transport.manager_client import ControlClient
from tests.gserver.contract.fixture import Way, contract_config, gserver_process, output_logprobs, publisher_for
from tests.gserver.embedded.test_adapters import random_adapter, with_adapter
from tests.gserver.harness import Run, live_gservers, managed
from tests.gserver.installed import sglang_python
from tests.gserver.running_sglang import START_SECONDS
from tests.gserver.tiny import response_logprobs
from tests.weights import FixedWeights

pytestmark = [
    pytest.mark.timeout(START_SECONDS + 120),
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed"),
]

LORA = LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
PROMPT = [3, 1, 4, 1, 5]
LONG = 200
SETTINGS = adapter_settings(LORA, "base")
TOLERANCE = 1e-4
"""Of log-probabilities in float32, in nats; those of other adapters differ by more than a hundred times as much."""


class Served:
    """A run with one SGLang server that takes adapters."""

    def __init__(self, run: Run, url: str, model: Any, client: GenerationClient, control: ControlClient) -> None:
        self.run = run
        self.url = url
        self.client = client
        self.adapters = {version: random_adapter(model, version, LORA) for version in (1, 2, 3)}
        self._models = {0: model} | {v: with_adapter(model, found, LORA) for v, found in self.adapters.items()}
        self.control = control
        self._publishers: list[Publisher] = []

    async def publish(self, version: int, way: Way) -> None:
        publisher = publisher_for(self.run.config, self.control, way)
        published = await publisher.publish(version, FixedWeights(self.adapters[version]))
        assert (published.attempts, published.pause_seconds) == (1, 0.0)
        self._publishers.append(publisher)

    def remove_files(self) -> None:
        """Of what was published."""
        for publisher in self._publishers:
            publisher.close()

    async def generate(self, version: int, tokens: int) -> GenerateReply:
        return await self.client.generate(self.url, request(version, tokens))

    def check(self, reply: GenerateReply, version: int) -> None:
        """All of it was sampled under this adapter and no other."""
        for other, model in self._models.items():
            expected = response_logprobs(model, PROMPT, reply.output_ids)
            difference = float((torch.tensor(output_logprobs(reply)) - expected).abs().max())
            assert difference < TOLERANCE if other == version else difference > 100 * TOLERANCE, (other, difference)

    async def loaded(self) -> set[str]:
        cards = await self.client.get(self.url, "/v1/models", ModelCards)
        return {card.id for card in cards.data if card.parent is not None}


def request(version: int, tokens: int) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return GenerateRequest(
        input_ids=list(PROMPT), sampling_params=params, return_logprob=True, lora_path=adapter_name(version)
    )


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    config = contract_config("sglang", folder, "in_place", joins=(), count=1, tensor_parallel=1)
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, lora=LORA),
        weights=msgspec.structs.replace(config.weights, mode="disk"),
    )
    model_dir = ensure_checkpoint(config, cache=folder / "cache")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    async with managed(config) as run, gserver_process(run, folder, model_dir, 0) as process:
        ended = asyncio.create_task(process.ended())
        live = asyncio.create_task(run.until(lambda s: live_gservers(s) == {0}, timeout=START_SECONDS))
        await asyncio.wait({ended, live}, return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), f"the gserver has ended; its last words:\n{process.output[-4000:]}"
        ended.cancel()
        live.result()
        url = (await run.process("gserver", 0)).address
        client = GenerationClient(timeout=60.0, key=generation_key(config, run.secret))
        client.control_keys[url] = control_key(config, run.secret, 0)
        control = ControlClient(run.url, secret=run.secret)
        found = Served(run, url, model, client, control)
        try:
            yield found
        finally:
            found.remove_files()
            await control.close()
            await client.close()


class Damaged(WeightFiles):
    """Writes into the file after checksums were taken of it."""

    def prepare(self, version: int, weights: Any) -> None:
        super().prepare(version, weights)
        (file,) = Path(self.announce().folder).glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-4:] = b"\0\0\x80?"
        file.write_bytes(content)


async def test_requests_have_the_adapter_that_they_name_whatever_comes_meanwhile(tmp_path: Path) -> None:
    async with served(tmp_path) as gserver:
        gserver.check(await gserver.generate(0, 20), 0)
        ways: Sequence[Way] = ("disk", "shared_memory")
        for version, way in enumerate(ways, start=1):
            running = asyncio.create_task(gserver.generate(version - 1, LONG))
            await asyncio.sleep(0.2)
            assert not running.done()
            await gserver.publish(version, way)
            batch: dict[int, GenerateReply] = {}
            named = list(range(version + 1))
            requests = [request(v, 20) for v in named]
            requests = [msgspec.structs.replace(r, rid=f"{version}/{i}") for i, r in enumerate(requests)]
            await gserver.client.generate_batch(gserver.url, requests, batch.__setitem__)
            for index, v in enumerate(named):
                gserver.check(batch[index], v)
            gserver.check(await running, version - 1)
            assert (await gserver.client.model_info(gserver.url)).weight_version == str(version)
        assert await gserver.loaded() == {"streamrl-v1", "streamrl-v2"}

        with pytest.raises(PeerError, match=NO_ADAPTER) as missing:
            await gserver.generate(3, 4)
        assert missing.value.status == 400

        damaged = Damaged(
            tmp_path / "damaged", durable=True, machine="", dtype=torch.float32, checksum=True, adapter=SETTINGS
        )
        publisher = Publisher(
            client=gserver.control,
            config=overridden(gserver.run.config, ["weights.attempts=1"]),
            carriers=Carriers(damaged),
            in_thread=asyncio.to_thread,
        )
        with pytest.raises(PublicationError, match="received other weights than were trained"):
            await publisher.publish(3, FixedWeights(gserver.adapters[3]))
        publisher.close()
        assert (await gserver.client.model_info(gserver.url)).weight_version == "2"
        gserver.check(await gserver.generate(2, 20), 2)

        await gserver.client.post(gserver.url, "/unload_lora_adapter", UnloadLoraAdapter("streamrl-v1"), LoadedAdapters)
        gserver.remove_files()  # SGLang would load it again from these
        with pytest.raises(PeerError, match=NO_ADAPTER):
            await gserver.generate(1, 4)
