"""A weight update for real: the publisher, the manager, and embedded gservers in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from streamrl import config as configuration
from streamrl.checksum import weights_checksum
from streamrl.config import Config, LoraConfig
from streamrl.lora import adapter_specs
from streamrl.models import ensure_checkpoint
from streamrl.trainer.worker.publisher import Carriers, Publisher, carriers_for
from streamrl.transport.addresses import LOOPBACK
from streamrl.transport.collective import Broadcaster
from streamrl.transport.control import PublishBegin, PublishBeginReply
from streamrl.transport.generation import (
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)
from streamrl.transport.keys import control_key, generation_key
from streamrl.transport.manager_client import ControlClient
from tests.e2e.harness import Command, start_command
from tests.gserver.harness import Run, live_gservers, managed, small_config
from tests.weights import FixedWeights

TIMEOUT = 5.0


@asynccontextmanager
async def gserver_processes(run: Run, folder: Path, model_dir: Path) -> AsyncIterator[list[Command]]:
    file = folder / "config.toml"
    file.write_text(configuration.to_toml(run.config))
    options = ("--manager", run.url, "--model-dir", str(model_dir))
    indices = range(run.config.gserver.count)
    commands = (["gserver", str(file), *options, "--index", str(index)] for index in indices)
    processes = [start_command(command, shown=True) for command in commands]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


class KillingClient(ControlClient):
    """Kills a gserver in the moment in which an update begins."""

    victim: Command | None = None

    async def publish_begin(self, message: PublishBegin, *, timeout: float) -> PublishBeginReply:
        reply = await super().publish_begin(message, timeout=timeout)
        if self.victim is not None:
            self.victim.end()
            self.victim = None
        return reply


def tiny_config(folder: Path, *, gservers: int = 2, **weights: Any) -> Config:
    return small_config(
        folder,
        model={
            "path": "scratch",
            "scratch": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16},
        },
        data={"max_prompt_tokens": 64},
        rollout={"sampling": {"max_new_tokens": 128}},
        run={"dir": str(folder), "device": "cpu"},
        gserver={"count": gservers, "max_context": 256, "dtype": "float32"},
        weights={"mode": "collective", "bucket_mb": 0.01} | weights,
        limits={"update_seconds": TIMEOUT, "heartbeat_seconds": 0.2},
    )


@pytest.mark.timeout(120)
async def test_weights_reach_every_gserver_and_survive_the_death_of_one(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    model_dir = ensure_checkpoint(config, cache=tmp_path / "cache")
    initial = load_file(model_dir / "model.safetensors")
    async with managed(config) as run, gserver_processes(run, tmp_path, model_dir) as processes:
        client = GenerationClient(timeout=30.0, key=generation_key(config, run.secret))
        control = KillingClient(run.url, secret=run.secret)
        publisher = Publisher(
            client=control,
            config=config,
            carriers=carriers_for(
                config, listening=LOOPBACK, backend="gloo", dtype=torch.float32, device=torch.device("cpu"), numbers=0
            ),
            in_thread=asyncio.to_thread,
        )
        status = await run.until(lambda s: live_gservers(s) == {0, 1}, timeout=60.0)
        urls = [p.address for p in status.processes if p.role == "gserver"]
        client.control_keys |= {url: control_key(config, run.secret, index) for index, url in enumerate(urls)}
        before = [await client.checksum(url) for url in urls]
        assert before[0] == before[1]

        generating = asyncio.create_task(client.generate(urls[0], long_request()))
        published = await publisher.publish(1, FixedWeights(scaled(initial, 2.0)))
        assert published.attempts == 1
        assert 0 < published.pause_seconds < published.seconds
        after = [await client.checksum(url) for url in urls]
        assert after[0] == after[1] != before[0]
        reply = await generating
        spans = reply.meta_info.weight_versions
        assert spans is not None
        assert {span.version for span in spans} <= {"default", "0", "1"}
        assert (spans[0].start, spans[-1].end) == (0, reply.meta_info.completion_tokens)

        control.victim = processes[1]
        published = await publisher.publish(2, FixedWeights(scaled(initial, 3.0)))
        assert published.attempts == 2
        status = await run.client.status()
        assert status.ledger.policy_version == 2
        assert live_gservers(status) == {0}
        assert (await client.model_info(urls[0])).weight_version == "2"
        third = await client.checksum(urls[0])

        await publisher.publish(3, FixedWeights(initial))
        assert await client.checksum(urls[0]) == before[0]
        assert third not in (before[0], after[0])
        publisher.close()
        await control.close()
        await client.close()


class Killing(FixedWeights):
    """Kills a gserver before the weight at `place` is read for the first time."""

    def __init__(self, tensors: dict[str, Any], victim: Command, place: int) -> None:
        super().__init__(tensors)
        self._victim = victim
        self._place = place

    def weights(self) -> Generator[tuple[str, torch.Tensor]]:
        for place, weight in enumerate(super().weights()):
            if place == self._place:
                self._victim.end()
            yield weight


@pytest.mark.timeout(180)
async def test_a_gserver_that_is_killed_in_the_middle_of_a_broadcast_costs_itself_alone(tmp_path: Path) -> None:
    """The next attempt sends all weights to the others."""
    config = tiny_config(tmp_path, gservers=3)
    model_dir = ensure_checkpoint(config, cache=tmp_path / "cache")
    initial = load_file(model_dir / "model.safetensors")
    size = sum(tensor.nbytes for tensor in initial.values())
    async with managed(config) as run, gserver_processes(run, tmp_path, model_dir) as processes:
        client = GenerationClient(timeout=30.0, key=generation_key(config, run.secret))
        control = ControlClient(run.url, secret=run.secret)
        broadcaster = Broadcaster(config, backend="gloo", dtype=torch.float32, device=torch.device("cpu"))
        publisher = Publisher(
            client=control, config=config, carriers=Carriers(broadcaster), in_thread=asyncio.to_thread
        )
        status = await run.until(lambda s: live_gservers(s) == {0, 1, 2}, timeout=60.0)
        urls = [p.address for p in status.processes if p.role == "gserver"]
        client.control_keys |= {url: control_key(config, run.secret, index) for index, url in enumerate(urls)}

        new = scaled(initial, 2.0)
        published = await publisher.publish(1, Killing(new, processes[2], len(new) - 3))
        assert published.attempts == 2
        assert live_gservers(await run.client.status()) == {0, 1}
        assert size < broadcaster.sent_bytes <= 2 * size
        assert {(await client.checksum(url))["total"] for url in urls[:2]} == {weights_checksum(new).total}
        publisher.close()
        await control.close()
        await client.close()


@pytest.mark.timeout(180)
async def test_adapters_are_published_like_weights_and_requests_keep_theirs(tmp_path: Path) -> None:
    lora = LoraConfig(rank=2)
    config = tiny_config(tmp_path)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, lora=lora))
    model_dir = ensure_checkpoint(config, cache=tmp_path / "cache")
    base = [(name, tuple(weight.shape)) for name, weight in load_file(model_dir / "model.safetensors").items()]
    specs = adapter_specs(base, lora)

    def adapter(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in specs}

    def publisher(control: ControlClient, mode: str) -> Publisher:
        chosen = configuration.overridden(config, [f"weights.mode={mode}"])
        carriers = carriers_for(
            chosen, listening=LOOPBACK, backend="gloo", dtype=torch.float32, device=torch.device("cpu"), numbers=0
        )
        return Publisher(client=control, config=chosen, carriers=carriers, in_thread=asyncio.to_thread)

    async with managed(config) as run, gserver_processes(run, tmp_path, model_dir) as processes:
        client = GenerationClient(timeout=60.0, key=generation_key(config, run.secret))
        control = KillingClient(run.url, secret=run.secret)
        status = await run.until(lambda s: live_gservers(s) == {0, 1}, timeout=60.0)
        urls = [p.address for p in status.processes if p.role == "gserver"]
        client.control_keys |= {url: control_key(config, run.secret, index) for index, url in enumerate(urls)}
        for version, mode in enumerate(("collective", "shared_memory", "disk"), start=1):
            generating = asyncio.create_task(client.generate(urls[0], long_request()))
            await asyncio.sleep(0.05)
            if mode == "disk":
                control.victim = processes[1]
            publishing = publisher(control, mode)
            published = await publishing.publish(version, FixedWeights(adapter(version)))
            assert published.bytes == sum(tensor.nbytes for tensor in adapter(0).values())
            served = {(await client.checksum(url))["total"] for url in (urls if mode != "disk" else urls[:1])}
            assert served == {weights_checksum(adapter(version)).total}
            spans = (await generating).meta_info.weight_versions
            assert spans is not None
            assert len(spans) == 1  # whichever version it began with
            assert (await client.model_info(urls[0])).weight_version == str(version)
            publishing.close()
        assert live_gservers(await run.client.status()) == {0}
        await control.close()
        await client.close()


def scaled(weights: dict[str, Any], factor: float) -> dict[str, Any]:
    return {name: tensor * factor for name, tensor in weights.items()}


def long_request() -> GenerateRequest:
    return GenerateRequest(
        input_ids=[1, 2, 3], sampling_params=SamplingParams(max_new_tokens=200, ignore_eos=True), return_logprob=True
    )


def test_the_configuration_survives_its_file(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    file = tmp_path / "config.toml"
    file.write_text(configuration.to_toml(config))
    assert msgspec.to_builtins(configuration.load(file)) == msgspec.to_builtins(config)
