"""A weight update for real: the publisher, the manager, and embedded gservers in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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
from streamrl.trainer.worker.publisher import Publisher, carriers_for
from streamrl.transport.addresses import LOOPBACK
from streamrl.transport.control import PublishBegin, PublishBeginReply
from streamrl.transport.generation import (
    GenerateRequest,
    GenerationClient,
    SamplingParams,
    WeightsChecker,
)
from streamrl.transport.keys import control_key, generation_key
from streamrl.transport.manager_client import ControlClient
from tests.e2e.harness import Command, start_command
from tests.gserver.harness import Run, live_gservers, managed, small_config
from tests.weights import FixedWeights

TIMEOUT = 5.0


@asynccontextmanager
async def gserver_processes(run: Run, folder: Path) -> AsyncIterator[list[Command]]:
    file = folder / "config.toml"
    file.write_text(configuration.to_toml(run.config))
    indices = range(run.config.gserver.count)
    commands = (["gserver", str(file), "--manager", run.url, "--index", str(index)] for index in indices)
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


@pytest.mark.timeout(180)
async def test_adapters_are_published_like_weights_and_requests_keep_theirs(tmp_path: Path) -> None:
    lora = LoraConfig(rank=2)
    config = tiny_config(tmp_path)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, lora=lora))
    model_dir = ensure_checkpoint(config)
    base = [(name, tuple(weight.shape)) for name, weight in load_file(model_dir / "model.safetensors").items()]
    specs = adapter_specs(base, lora)

    def adapter(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in specs}

    def publisher(control: ControlClient, mode: str) -> Publisher:
        chosen = configuration.overridden(config, [f"weights.mode={mode}"])
        carriers = carriers_for(
            chosen, reach=LOOPBACK, backend="gloo", dtype=torch.float32, device=torch.device("cpu"), numbers=0
        )
        return Publisher(client=control, config=chosen, carriers=carriers, in_thread=asyncio.to_thread)

    async with managed(config) as run, gserver_processes(run, tmp_path) as processes:
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
            served = {
                (await client.post(url, "/weights_checker", WeightsChecker(), dict))["total"]
                for url in (urls if mode != "disk" else urls[:1])
            }
            assert served == {weights_checksum(adapter(version)).total}
            spans = (await generating).meta_info.weight_versions
            assert spans is not None
            assert len(spans) == 1  # whichever version it began with
            assert (await client.model_info(urls[0])).weight_version == str(version)
            publishing.close()
        assert live_gservers(await run.client.status()) == {0}
        await control.close()
        await client.close()


def long_request() -> GenerateRequest:
    return GenerateRequest(
        input_ids=[1, 2, 3], sampling_params=SamplingParams(max_new_tokens=200, ignore_eos=True), return_logprob=True
    )
