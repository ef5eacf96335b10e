"""A manager, two real gservers behind proxies, a publisher, and generation that never stops."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from streamrl import config as configuration
from streamrl.checksum import weights_checksum
from streamrl.config import Config
from streamrl.errors import StreamRLError
from streamrl.models import ensure_checkpoint
from streamrl.rollout.replies import token_versions
from streamrl.trainer.publisher import Publisher, carrier_for
from streamrl.transport.control.client import ControlClient
from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient, SamplingParams
from tests.gserver.faults.proxy import Armed, Fault, Proxy, listening
from tests.gserver.harness import Run, live_gservers, managed, small_config

TIMEOUT = 3.0
"""Of each wait in an update, in seconds."""
PATIENCE = 60.0
"""For what has to happen after a fault: generous, since the machine may be busy."""
TOLERANCE = 2e-4
"""Of log-probabilities in float32, in nats."""
FORGE = "tests.gserver.faults.forge"
GSERVERS = 2
PROMPT = [3, 1, 4, 1, 5]


class Weights:
    """What a `WeightSource` is to the publisher."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def weights(self) -> Generator[tuple[str, Tensor]]:
        yield from self._tensors.items()

    def end(self) -> None:
        """Nobody else has a part of them."""


class FaultyFleet:
    """What a test of faults needs; version v has the initial weights times `factor(v)`."""

    def __init__(self, run: Run, proxies: list[Proxy], *, folder: Path, model: Any, forge: Any) -> None:
        self.run = run
        self.proxies = proxies
        self.version = 0
        self.client = GenerationClient(timeout=PATIENCE)
        self.control = ControlClient(run.url)
        self.checked = 0
        """Responses whose every token was compared with the weights of its version."""
        self._folder = folder
        self._model = model
        self._initial = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self._forge = forge
        self._pids = 1000
        self._publisher_lock = asyncio.Lock()
        self.publisher = self.new_publisher()

    def new_publisher(self) -> Publisher:
        config = self.run.config
        return Publisher(
            client=self.control,
            config=config.weights,
            carrier=carrier_for(config, backend="gloo", dtype=torch.float32, device=torch.device("cpu")),
            in_thread=asyncio.to_thread,
        )

    def replace_publisher(self) -> None:
        """As after the death of the trainer's rank 0."""
        self.publisher.close()
        self.publisher = self.new_publisher()

    def weights(self, version: int) -> dict[str, Tensor]:
        return {name: tensor * (1.0 + 0.1 * (version % 7)) for name, tensor in self._initial.items()}

    async def publish(self) -> None:
        """Publish the next version; raises as the trainer would."""
        async with self._publisher_lock:
            async with asyncio.timeout(PATIENCE * 2):
                await self.publisher.publish(self.version + 1, Weights(self.weights(self.version + 1)))
            self.version += 1

    async def follow_late_gservers(self) -> None:
        """What the master does between two steps."""
        while True:
            wanted = await self.control.weights_wanted()
            async with self._publisher_lock:
                if wanted.gservers and wanted.version == self.version:
                    await self.publisher.publish(self.version, Weights(self.weights(self.version)), again=True)

    def arm(self, path: str, fault: Fault, *, skip: int = 0, gserver: int = 1) -> Armed:
        armed = self.proxies[gserver].armed = Armed(path, fault, skip)
        return armed

    async def start(self, proxy: Proxy) -> None:
        """A fresh process in the place of `proxy`, which registers."""
        order = {"config": str(self._folder / "config.toml"), "folder": str(self.model_dir), "index": proxy.index}
        self._forge.stdin.write(json.dumps(order).encode() + b"\n")
        await self._forge.stdin.drain()
        made = json.loads(await asyncio.wait_for(self._forge.stdout.readline(), PATIENCE))
        proxy.pid, proxy.target, proxy.alive, proxy.paused = made["pid"], made["url"], True, False
        self._pids += 1
        await self.run.register("gserver", proxy.index, address=proxy.url, pid=self._pids, host=socket.gethostname())

    @property
    def model_dir(self) -> Path:
        return self._folder / "model"

    async def heartbeats(self) -> None:
        """Of the gservers that live; a stopped one says nothing, but its place is remembered."""
        while True:
            for proxy in self.proxies:
                if proxy.alive:
                    await self.run.beat("gserver", proxy.index)
            await asyncio.sleep(0.1)

    async def generate_always(self) -> None:
        """One request after another at gservers that take groups; every answer is compared with its weights."""
        picks = random.Random(0)
        while True:
            live = sorted(live_gservers(await self.run.client.status()))
            if not live:
                await asyncio.sleep(0.05)
                continue
            # The proxy passes it on; what dies under a request is the business of its sender.
            with suppress(StreamRLError):
                self.check(await self.client.generate(self.proxies[picks.choice(live)].url, request(40)))

    @torch.inference_mode()
    def check(self, reply: GenerateReply) -> None:
        """Every token has the log-probability that it has under the weights of the version that it names."""
        outputs = reply.output_ids
        versions = token_versions(reply.meta_info, tokens=len(outputs))
        assert versions == sorted(versions)
        given = [entry[0] for entry in reply.meta_info.output_token_logprobs or ()]
        for version in set(versions):
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    parameter.copy_(self.weights(version)[name])
            rows = self._model(torch.tensor([[*PROMPT, *outputs]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            for place, (token, found) in enumerate(zip(outputs, given, strict=True)):
                if versions[place] == version:
                    assert found is not None
                    assert abs(found - float(rows[place, token])) < TOLERANCE, f"token {place} of version {version}"
        self.checked += 1

    async def settle(self) -> None:
        """Let what failed come back, and see that all serve the same, unmixed and unpaused."""
        for proxy in self.proxies:
            proxy.armed = None
            proxy.hang_up()
            if proxy.alive:
                proxy.signal(signal.SIGCONT)
            else:
                await self.start(proxy)
        await self.run.until(
            lambda status: live_gservers(status) == set(range(GSERVERS)) and status.publication["state"] != "forming",
            timeout=PATIENCE,
        )
        status = await self.run.client.status()
        assert status.ledger.policy_version == self.version
        expected = weights_checksum(self.weights(self.version)).total
        for proxy in self.proxies:
            served = (await self.client.checksum(proxy.url))["total"]
            assert served == expected, self._explain(proxy, served)
            assert (await self.client.model_info(proxy.url)).weight_version in self.labels()
            reply = await self.client.generate(proxy.url, request(4))  # generation goes on
            assert set(token_versions(reply.meta_info, tokens=4)) == {self.version}
            self.check(reply)
            assert not proxy.paused

    def _explain(self, proxy: Proxy, served: str) -> str:
        same = [v for v in range(self.version + 2) if weights_checksum(self.weights(v)).total == served]
        return f"gserver/{proxy.index} serves the weights of {same or 'no version'} instead of v{self.version}"

    def labels(self) -> set[str]:
        return {"default", "0"} if self.version == 0 else {str(self.version)}


def request(tokens: int) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return GenerateRequest(input_ids=PROMPT, sampling_params=params, return_logprob=True)  # type: ignore[arg-type]


def fleet_config(folder: Path, mode: str) -> Config:
    return small_config(
        folder,
        model={
            "path": "scratch",
            "scratch": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32},
        },
        data={"max_prompt_tokens": 64},
        rollout={"sampling": {"max_new_tokens": 128}},
        run={"dir": str(folder), "device": "cpu"},
        gserver={"count": GSERVERS, "max_context": 256, "max_running": 8, "dtype": "float32"},
        # `retract`, so that every token can be compared: nothing of the old weights is attended to
        weights={"mode": mode, "timeout_seconds": TIMEOUT, "bucket_mb": 0.2, "pause_mode": "retract"},
        manager={"heartbeat_seconds": 0.1, "lease_seconds": 5.0},
    )


@asynccontextmanager
async def faulty_fleet(folder: Path, mode: str) -> AsyncIterator[FaultyFleet]:
    """Two gservers that serve version 0, with generation under way; what fails in the background fails the test."""
    config = fleet_config(folder, mode)
    (folder / "config.toml").write_text(configuration.to_toml(config))
    (folder / "model").symlink_to(ensure_checkpoint(config, cache=folder / "cache"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    forge = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", FORGE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        async with AsyncExitStack() as stack:
            run = await stack.enter_async_context(managed(config))
            proxies = [await stack.enter_async_context(listening(Proxy(index))) for index in range(GSERVERS)]
            fleet = FaultyFleet(run, proxies, folder=folder, model=model, forge=forge)
            stack.push_async_callback(fleet.client.close)
            stack.push_async_callback(fleet.control.close)
            stack.callback(lambda: fleet.publisher.close())
            for proxy in proxies:
                await fleet.start(proxy)
            await run.register("rollout")
            await run.until(lambda status: live_gservers(status) == {0, 1}, timeout=PATIENCE)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(fleet.heartbeats()),
                    group.create_task(fleet.generate_always()),
                    group.create_task(fleet.follow_late_gservers()),
                ]
                yield fleet
                for task in tasks:
                    task.cancel()
    finally:
        forge.kill()
        await forge.wait()
