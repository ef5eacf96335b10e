"""One gserver process of a run, with the manager and a publisher: whatever its engine is."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.models import ensure_checkpoint
from streamrl.trainer.publisher import Publisher, carrier_for
from streamrl.transport.control import ControlClient
from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient, PauseMode, SamplingParams
from tests.gserver.contract.installed import sglang_python
from tests.gserver.harness import Run, live_gservers, managed, small_config

START_SECONDS = 240.0
JSON = {"Content-Type": "application/json"}


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
        self.pause_mode = run.config.weights.pause_mode
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

    async def generate(self, prompt: Sequence[int], tokens: int, *, rid: str | None = None) -> GenerateReply:
        return await self.client.generate(self.url, request(prompt, tokens, rid=rid))

    async def begin(self, prompt: Sequence[int], tokens: int, *, rid: str | None = None) -> asyncio.Task[GenerateReply]:
        """Ask for a response and wait for its first token."""
        begun = asyncio.Event()
        task = asyncio.create_task(self._stream(request(prompt, tokens, rid=rid, stream=True), begun))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait({task, waiting}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert begun.is_set(), "no token came"
        return task

    async def _stream(self, body: GenerateRequest, begun: asyncio.Event) -> GenerateReply:
        last = b""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/generate", data=msgspec.json.encode(body), headers=JSON) as response,
        ):
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = line.removeprefix(b"data: ")
                    begun.set()
        return msgspec.json.decode(last, type=GenerateReply)


def request(prompt: Sequence[int], tokens: int, *, rid: str | None = None, stream: bool = False) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return GenerateRequest(input_ids=list(prompt), sampling_params=params, rid=rid, return_logprob=True, stream=stream)


def output_logprobs(reply: GenerateReply) -> list[float]:
    return [entry[0] for entry in reply.meta_info.output_token_logprobs or () if entry[0] is not None]


@asynccontextmanager
async def contract(engine: str, folder: Path, *, pause_mode: PauseMode) -> AsyncIterator[Contract]:
    """A run with one gserver of `engine`, which serves."""
    config = contract_config(engine, folder, pause_mode)
    model_dir = ensure_checkpoint(config, cache=folder / "cache")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    async with managed(config) as run, gserver_process(run, folder, model_dir) as process:
        ended = asyncio.create_task(process.wait())
        live = asyncio.create_task(run.until(lambda s: live_gservers(s) == {0}, timeout=START_SECONDS))
        await asyncio.wait({ended, live}, return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), f"the gserver ended with {process.returncode}; its log is in the test's output"
        ended.cancel()
        live.result()
        address = (await run.process("gserver")).address
        control = ControlClient(run.url)
        publisher = Publisher(
            client=control,
            config=config.weights,
            carrier=carrier_for(config, backend="gloo", dtype=torch.float32, device=torch.device("cpu")),
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
async def gserver_process(run: Run, folder: Path, model_dir: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    file = folder / "config.toml"
    file.write_text(configuration.to_toml(run.config))
    command = [sys.executable, "-m", "streamrl", "gserver", str(file), "--manager", run.url, "--index", "0"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--model-dir", str(model_dir)),
        env=os.environ | {"OMP_NUM_THREADS": "1", "STREAMRL_LOG": "DEBUG"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def contract_config(engine: str, folder: Path, pause_mode: PauseMode) -> Config:
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
        weights={"timeout_seconds": 30.0, "bucket_mb": 0.05, "pause_mode": pause_mode},
        manager={"heartbeat_seconds": 0.2},
    )
