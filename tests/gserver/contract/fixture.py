"""One gserver process of a run, with the manager and a publisher: whatever its engine is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.models import ensure_checkpoint
from streamrl.trainer.publisher import Publisher
from streamrl.transport.control import ControlClient
from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient, SamplingParams
from tests.gserver.contract.installed import sglang_python
from tests.gserver.harness import Run, live_gservers, managed, small_config

START_SECONDS = 240.0


class FixedWeights:
    """Weights to publish."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(tensor.shape)) for name, tensor in self._weights.items()]

    def weights(self) -> Generator[tuple[str, Tensor]]:
        yield from self._weights.items()

    def end(self) -> None:
        """Nobody else has a part of them."""


class Contract:
    """What a test of the contract needs."""

    def __init__(self, engine: str, url: str, *, run: Run, publisher: Publisher, model: Any) -> None:
        self.engine = engine
        self.url = url
        self.run = run
        self.client = GenerationClient(timeout=60.0)
        self.version = 0
        self._model = model
        self._publisher = publisher
        self._initial = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    async def publish(self, factor: float) -> None:
        """Publish the initial weights times `factor` as the next version; `logprobs` follow them."""
        new = {name: tensor * factor for name, tensor in self._initial.items()}
        await self._publisher.publish(self.version + 1, FixedWeights(new))
        self.version += 1
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(new[name])

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """What transformers gives the tokens of a response under the weights published last."""
        rows = self._model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found: list[float] = rows.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
        return found

    async def generate(self, prompt: list[int], tokens: int, *, rid: str | None = None, n: int = 1) -> Any:
        assert n == 1
        return await self.client.generate(self.url, request(prompt, tokens, rid=rid))

    async def until_running(self, count: int) -> None:
        """Until the engine says that so many requests run, for tests that interrupt them."""
        async with asyncio.timeout(30):
            while True:
                stats = (await self.run.process("gserver")).stats
                if stats.get("running") == count:
                    return
                await asyncio.sleep(0.1)


def request(prompt: list[int], tokens: int, *, rid: str | None = None) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return GenerateRequest(input_ids=list(prompt), sampling_params=params, rid=rid, return_logprob=True)


def output_logprobs(reply: GenerateReply) -> list[float]:
    return [entry[0] for entry in reply.meta_info.output_token_logprobs or () if entry[0] is not None]


@asynccontextmanager
async def contract(engine: str, folder: Path, **weights: Any) -> AsyncIterator[Contract]:
    """A run with one gserver of `engine`, which serves."""
    config = contract_config(engine, folder, weights)
    model_dir = ensure_checkpoint(config, cache=folder / "cache")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    async with managed(config) as run, gserver_process(run, folder, model_dir) as process:
        ended = asyncio.create_task(asyncio.to_thread(process.wait))
        live = asyncio.create_task(run.until(lambda s: live_gservers(s) == {0}, timeout=START_SECONDS))
        await asyncio.wait({ended, live}, return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), f"the gserver ended with {process.returncode}; its log is in the test's output"
        address = (await run.process("gserver")).address
        control = ControlClient(run.url)
        publisher = Publisher(
            client=control,
            config=config.weights,
            backend="gloo",
            dtype=torch.float32,
            device=torch.device("cpu"),
            in_thread=asyncio.to_thread,
        )
        found = Contract(engine, address, run=run, publisher=publisher, model=model)
        try:
            yield found
        finally:
            publisher.close()
            await control.close()
            await found.client.close()


@asynccontextmanager
async def gserver_process(run: Run, folder: Path, model_dir: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    file = folder / "config.toml"
    file.write_text(configuration.to_toml(run.config))
    command = [sys.executable, "-m", "streamrl", "gserver", str(file), "--manager", run.url, "--index", "0"]
    process = subprocess.Popen(
        [*command, "--model-dir", str(model_dir)], env=os.environ | {"OMP_NUM_THREADS": "1", "STREAMRL_LOG": "DEBUG"}
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 20)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


def contract_config(engine: str, folder: Path, weights: dict[str, Any]) -> Config:
    return small_config(
        folder,
        model={
            "path": "scratch",
            "scratch": {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32},
        },
        data={"max_prompt_tokens": 64},
        rollout={"sampling": {"max_new_tokens": 128}},
        run={"dir": str(folder), "device": "cpu"},
        gserver={
            "engine": engine,
            "max_context": 512,
            "max_running": 8,
            "dtype": "float32",
            "sglang": {"python": sglang_python() or "", "start_timeout_seconds": START_SECONDS},
        },
        weights={"timeout_seconds": 30.0, "bucket_mb": 0.05, **weights},
        manager={"heartbeat_seconds": 0.2},
    )
