"""A manager, two real gservers behind proxies, a publisher, and generation that never stops."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from streamrl import config as configuration
from streamrl.checksum import weights_checksum
from streamrl.config import Config, SamplingConfig
from streamrl.models import ensure_checkpoint
from streamrl.rollout.generation import Generator as Responses
from streamrl.rollout.generation import GroupRoute, token_versions, unmixed
from streamrl.transport.credentials import generation_key
from streamrl.transport.generation import (
    GenerateReply,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
    WeightsChecker,
)
from streamrl.transport.manager_client import ControlClient
from streamrl.types import Generation
from tests.gserver.harness import Run, live_gservers, managed, small_config
from tests.gserver.running_sglang import GROUP_SECONDS, KEY_VARIABLE, SCRATCH, RunningSglang
from tests.gserver.updates.faults.places import Places, embedded_places, sglang_places
from tests.gserver.updates.faults.proxy import Armed, Fault, Proxy, listening
from tests.weights import FixedWeights, cpu_publisher

TIMEOUT = {"embedded": 3.0, "sglang": GROUP_SECONDS}
"""Of each wait in an update, in seconds; SGLang's scheduler answers between two steps only."""
SGLANG_ATTEMPTS = 6
"""At an update: on a busy machine more than what was armed comes too late."""
PATIENCE = 60.0
"""For what has to happen after a fault: generous, since the machine may be busy."""
RESPONSE_PATIENCE = 300.0
"""For a token of a response, whose gservers may fail one after another."""
TOLERANCE = 2e-4
"""Of log-probabilities in float32, in nats."""
GSERVERS = 2
PROMPT = [3, 1, 4, 1, 5]
RESPONSE_TOKENS = 40
STREAMS = 2
"""Responses that are made at any time."""
FACTORS = 7
"""So many versions differ; then they come again."""


class FaultyFleet:
    """What a test of faults needs; version v has the initial weights times `factor(v)`."""

    def __init__(self, run: Run, proxies: list[Proxy], *, places: Places, model: Any) -> None:
        self.run = run
        self.proxies = proxies
        self.version = 0
        self.client = OrderedVersions(timeout=PATIENCE, key=generation_key(run.config, run.secret))
        self.control = ControlClient(run.url, secret=run.secret)
        self.checked = 0
        """Responses whose every token was compared with the weights of its version."""
        self._places = places
        self._model = model
        self._initial = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self._pids = 1000
        self._publisher_lock = asyncio.Lock()
        self.publisher = cpu_publisher(run.config, self.control)

    async def replace_publisher(self) -> None:
        """As after the death of the trainer's rank 0."""
        await asyncio.to_thread(self.publisher.close)
        self.publisher = cpu_publisher(self.run.config, self.control)

    def weights(self, version: int) -> dict[str, Tensor]:
        return {name: tensor * (1.0 + 0.1 * (version % FACTORS)) for name, tensor in self._initial.items()}

    async def publish(self) -> None:
        """Publish the next version; raises as the trainer would."""
        async with self._publisher_lock:
            async with asyncio.timeout(PATIENCE * 2):
                await self.publisher.publish(self.version + 1, FixedWeights(self.weights(self.version + 1)))
            self.version += 1

    async def follow_late_gservers(self) -> None:
        """What the master does between two steps."""
        while True:
            await self.run.manager.resync_needed()
            async with self._publisher_lock:
                if self.run.manager.ledger.policy_version == self.version:
                    await self.publisher.publish(self.version, FixedWeights(self.weights(self.version)), resync=True)

    def arm(self, path: str, fault: Fault, *, skip: int) -> Armed:
        armed = self.proxies[1].armed = Armed(path, fault, skip)
        return armed

    async def start(self, proxy: Proxy) -> None:
        """A fresh process in the place of `proxy`, which registers."""
        proxy.fill(await self._places.fresh(proxy.index))
        self._pids += 1
        await self.run.register("gserver", proxy.index, address=proxy.url, pid=self._pids)

    async def heartbeats(self) -> None:
        """Of the gservers that live; a stopped one says nothing, but its place is remembered."""
        while True:
            for proxy in self.proxies:
                if proxy.alive:
                    await self.run.beat("gserver", proxy.index)
            await asyncio.sleep(0.1)

    async def generate_always(self, seed: int) -> None:
        """One response after another, from gservers that take groups; every token is compared with its weights."""
        responses = Responses(
            self.client,
            sampling=SamplingConfig(),
            seed=1,
            patience=RESPONSE_PATIENCE,
            tokens_per_request=RESPONSE_TOKENS // 2,
            decode=str,
            eos_token_ids=(),
            policy_version=lambda: self.version,
        )
        route = route_to_live_gservers(self.run, seed=seed)
        while True:
            await route.replace(route.gserver)
            self.check(await responses.generate(PROMPT, max_new_tokens=RESPONSE_TOKENS, rid=f"r{seed}", route=route))

    @torch.inference_mode()
    def check(self, response: Generation) -> None:
        """Every token has the log-probability that it has under the weights of the version that it names."""
        outputs = response.output_ids
        for version in set(response.versions):
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    parameter.copy_(self.weights(version)[name])
            rows = self._model(torch.tensor([[*PROMPT, *outputs]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            for place, (token, found) in enumerate(zip(outputs, response.logprobs, strict=True)):
                if response.versions[place] == version:
                    assert abs(found - float(rows[place, token])) < TOLERANCE, f"token {place} of version {version}"
        self.checked += 1

    async def settle(self) -> None:
        """Let what failed come back, and see that all serve the same, unmixed and unpaused."""
        for proxy in self.proxies:
            proxy.armed = None
            proxy.hang_up()
            if proxy.alive:
                proxy.go_on()
            else:
                await self.start(proxy)
        await self.run.until(
            lambda status: live_gservers(status) == set(range(GSERVERS)) and status.publication["state"] != "prepare",
            timeout=PATIENCE,
        )
        status = await self.run.client.status()
        assert status.ledger.policy_version == self.version
        for proxy in self.proxies:
            await self._check_weights(proxy)
            assert (await self.client.model_info(proxy.url)).weight_version in self.labels()
            reply = await self.client.generate(proxy.url, request(4))  # generation continues
            assert set(token_versions(reply.meta_info, tokens=4)) == {self.version}
            self.check(response_of(reply))
            assert not proxy.paused

    async def _check_weights(self, proxy: Proxy) -> None:
        """They are those of the version, to the bit."""
        served = await self.client.post(proxy.url, "/weights_checker", WeightsChecker(), dict)
        if self.run.config.gserver.engine == "sglang":
            assert served["ranks"][0]["checksums"] == sglang_checksums(self.weights(self.version)), proxy.url
            return
        expected = weights_checksum(self.weights(self.version)).total
        same = [v for v in range(self.version + 2) if weights_checksum(self.weights(v)).total == served["total"]]
        assert served["total"] == expected, f"{proxy.url} serves the weights of {same} instead of v{self.version}"

    def labels(self) -> set[str]:
        return {"default", "0"} if self.version == 0 else {str(self.version)}


class OrderedVersions(GenerationClient):
    """Responses end by their length alone; within an answer no version comes after a newer one."""

    async def generate(self, url: str, request: GenerateRequest) -> GenerateReply:
        params = msgspec.structs.replace(request.sampling_params, ignore_eos=True)
        reply = await super().generate(url, msgspec.structs.replace(request, sampling_params=params))
        versions = token_versions(unmixed(reply).meta_info, tokens=len(unmixed(reply).output_ids))
        assert versions == sorted(versions)
        return reply


def route_to_live_gservers(run: Run, *, seed: int) -> GroupRoute:
    """Return a route that goes to any gserver that takes groups."""
    picks = random.Random(seed)

    async def find_another(failed: str) -> str:
        status = await run.until(lambda status: bool(live_gservers(status)), timeout=PATIENCE)
        live = [p.address for p in status.processes if p.role == "gserver" and p.state == "live"]
        return picks.choice([url for url in live if url != failed] or live)

    return GroupRoute("", find_another=find_another)


def response_of(reply: GenerateReply) -> Generation:
    """An answer as it came."""
    return Generation(
        output_ids=reply.output_ids,
        logprobs=[entry[0] or 0.0 for entry in reply.meta_info.output_token_logprobs or ()],
        versions=token_versions(reply.meta_info, tokens=len(reply.output_ids)),
        finish_reason="length",
        matched=None,
        interruptions=0,
    )


SGLANG_FUSES = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
SGLANG_PADS_VOCABULARY = 64


def sglang_checksums(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """What one rank of real SGLang on a CPU answers of `weights`: its own names, the first eight bytes of SHA-256."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        kind = name.split(".")[-2]
        parts.setdefault(name.replace(kind, SGLANG_FUSES.get(kind, kind)), []).append(tensor)
    embedding = parts["model.embed_tokens.weight"]
    embedding.append(torch.zeros(-len(embedding[0]) % SGLANG_PADS_VOCABULARY, embedding[0].shape[1]))
    return {
        name: hashlib.sha256(torch.cat(tensors).numpy().tobytes()).hexdigest()[:16] for name, tensors in parts.items()
    }


def request(tokens: int) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return GenerateRequest(input_ids=PROMPT, sampling_params=params, return_logprob=True)  # type: ignore[arg-type]


def fleet_config(engine: str, folder: Path, mode: str) -> Config:
    sglang = {"addresses": [f"http://stands.for.{index}" for index in range(GSERVERS)]}
    own = {"engine": engine, "sglang": sglang, "api_key_env": KEY_VARIABLE} if engine == "sglang" else {}
    return small_config(
        folder,
        model=SCRATCH,
        data={"max_prompt_tokens": 64},
        rollout={"sampling": {"max_new_tokens": 128}},
        run={"dir": str(folder), "device": "cpu"},
        gserver={"count": GSERVERS, "max_context": 256, "max_running": 8, "dtype": "float32"} | own,
        # `retract`, so that every token can be compared: nothing of the old weights is attended to
        weights={"mode": mode, "bucket_mb": 0.2, "pause_mode": "retract"}
        | ({"attempts": SGLANG_ATTEMPTS} if engine == "sglang" else {}),
        limits={"update_seconds": TIMEOUT[engine], "heartbeat_seconds": 0.1, "silence_seconds": 5.0},
    )


@asynccontextmanager
async def faulty_fleet(
    folder: Path, mode: str, *, engine: str = "embedded", running: RunningSglang
) -> AsyncIterator[FaultyFleet]:
    """Two gservers that serve version 0, with generation under way; what fails in the background fails the test."""
    config = fleet_config(engine, folder, mode)
    config_file = folder / "config.toml"
    config_file.write_text(configuration.to_toml(config))
    model_dir = ensure_checkpoint(config, cache=folder / "cache")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    async with AsyncExitStack() as stack:
        places: Places
        if engine == "embedded":
            places = stack.enter_context(embedded_places(config_file, model_dir))
        else:
            places = await stack.enter_async_context(sglang_places(config, running, model_dir))
        run = await stack.enter_async_context(managed(config))
        proxies = [await stack.enter_async_context(listening(Proxy(index))) for index in range(GSERVERS)]
        fleet = FaultyFleet(run, proxies, places=places, model=model)
        stack.push_async_callback(fleet.client.close)
        stack.push_async_callback(fleet.control.close)
        stack.push_async_callback(lambda: asyncio.to_thread(fleet.publisher.close))
        for proxy in proxies:
            await fleet.start(proxy)
        await run.register("rollout")
        await run.until(lambda status: live_gservers(status) == {0, 1}, timeout=PATIENCE)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(fleet.heartbeats()),
                *(group.create_task(fleet.generate_always(seed)) for seed in range(STREAMS)),
                group.create_task(fleet.follow_late_gservers()),
            ]
            yield fleet
            for task in tasks:
                task.cancel()
