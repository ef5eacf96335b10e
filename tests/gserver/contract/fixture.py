"""Gserver processes of a run, with the manager and a publisher: whatever their engine is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Collection, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.gserver.server.engine import Text
from streamrl.models import ensure_checkpoint
from streamrl.rollout.generation import GroupRoute
from streamrl.trainer.worker.publisher import Publisher
from streamrl.transport.credentials import bearer, control_key, generation_key
from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient, PauseMode, SamplingParams
from streamrl.transport.manager_client import ControlClient
from tests.e2e.harness import Command, start_command
from tests.gserver.harness import Run, live_gservers, managed, small_config
from tests.gserver.installed import sglang_python, vllm_python
from tests.gserver.running_sglang import KEY_VARIABLE, MAX_CONTEXT, MAX_RUNNING, SCRATCH, START_SECONDS
from tests.weights import FixedWeights, cpu_publisher

MODES: list[PauseMode] = ["in_place", "retract", "abort"]
Way = Literal["collective", "disk", "shared_memory"]
WAYS: list[Way] = ["collective", "disk", "shared_memory"]
Served = tuple[Literal["embedded", "sglang", "vllm"], PauseMode, int]
"""Engine, what a weight update does to running requests, and the ranks of a server."""
ONE_OF_EACH: list[Served] = [("embedded", "in_place", 1), ("sglang", "in_place", 1), ("vllm", "in_place", 1)]
JOINED: Served = ("sglang", "retract", 1)
"""A server that ran before its gserver, and asks for a key."""
TWO_RANKS: Served = ("sglang", "retract", 2)
WHATEVER_THE_PAUSE: list[Served] = [
    *ONE_OF_EACH,
    *(("embedded", mode, 1) for mode in MODES[1:]),
    *(("sglang", mode, 1) for mode in MODES[1:]),
    *(("vllm", mode, 1) for mode in MODES[1:]),
]
served = pytest.mark.served
"""Which gservers a test is about."""
MARKS = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(START_SECONDS + 120)]
"""Of all tests of the package, which share gservers that take long to start."""
TOLERANCE = 1e-4
"""Of log-probabilities in float32, in nats."""
JSON = {"Content-Type": "application/json"}


LONG = {"embedded": 5000, "sglang": 1200, "vllm": 1200}
"""Tokens of a response that goes on for longer than an update takes."""


class InterruptedWeights(FixedWeights):
    """Weights during whose first pass something may happen."""

    def __init__(self, weights: dict[str, Tensor], *, halfway: Callable[[], None]) -> None:
        """`halfway` is called once, when half of them were read."""
        super().__init__(weights)
        self._halfway = halfway

    def weights(self) -> Generator[tuple[str, Tensor]]:
        for number, item in enumerate(super().weights()):
            if number == len(self.specs()) // 2:
                halfway, self._halfway = self._halfway, lambda: None
                halfway()
            yield item


class Contract:
    """What a test of the contract needs."""

    def __init__(
        self,
        engine: str,
        urls: list[str],
        *,
        run: Run,
        publisher: Callable[[Way], Publisher],
        model: Any,
        model_dir: Path,
        processes: list[Command],
    ) -> None:
        self.engine = engine
        self.long = LONG[engine]
        self.pause_mode = run.config.weights.pause_mode
        self.urls = urls
        self.url = urls[0]
        self.processes = processes
        self.run = run
        self.key = generation_key(run.config, run.secret)
        self.client = GenerationClient(timeout=60.0, key=self.key)
        keys = {url: control_key(run.config, run.secret, index) for index, url in enumerate(urls)}
        self.client.control_keys |= keys  # with which the manager changes them
        self.version = 0
        self.text = Text(model_dir)
        self._model = model
        self._publisher = publisher
        self._factors = {0: 1.0}
        self._initial = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    @property
    def living(self) -> list[str]:
        """URLs of the gservers whose processes live."""
        return [url for url, process in zip(self.urls, self.processes, strict=True) if process.running]

    def kill(self, index: int) -> None:
        """SIGKILL to the process that serves: SGLang's or vLLM's, or the gserver's."""
        process = psutil.Process(self.processes[index].pid)
        victim = process if self.engine == "embedded" else process.children()[0]
        victim.send_signal(signal.SIGKILL)

    async def publish(
        self, factor: float, *, way: Way = "collective", halfway: Callable[[], None] = lambda: None
    ) -> None:
        """Publish the initial weights times `factor` as the next version; `logprobs` follow them."""
        new = {name: tensor * factor for name, tensor in self._initial.items()}
        await self._publisher(way).publish(self.version + 1, InterruptedWeights(new, halfway=halfway))
        self.published(factor)

    def published(self, factor: float) -> None:
        """The initial weights times `factor` are the next version."""
        self.version += 1
        self._factors[self.version] = factor

    def model_of(self, version: int) -> Any:
        """transformers with the weights of `version`, until the next call."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self._initial[name] * self._factors[version])
        return self._model

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """`[tokens, vocab]`: what transformers makes each token of a response from, by the weights published last."""
        logits: Tensor = self.model_of(self.version)(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        return logits

    def logprobs(self, prompt: Sequence[int], output: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """What transformers gives the tokens of a response under the weights published last."""
        rows = (self.logits(prompt, output) / temperature).log_softmax(-1)
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
            session.post(
                f"{self.url}/generate", data=msgspec.json.encode(body), headers=JSON | bearer(self.key)
            ) as response,
        ):
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = line.removeprefix(b"data: ")
                    begun.set()
        return msgspec.json.decode(last, type=GenerateReply)


def fixed_route(urls: Collection[str], *, first: int) -> GroupRoute:
    """Return a route that begins at the gserver number `first`, and continues at the next one when one fails."""
    turns = itertools.islice(itertools.cycle(urls), first % len(urls), None)

    async def find_another(failed: str) -> str:
        return next(turns)

    return GroupRoute(next(turns), find_another=find_another, name="gserver/0")


def request(prompt: Sequence[int], tokens: int, *, rid: str | None = None, stream: bool = False) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return GenerateRequest(input_ids=list(prompt), sampling_params=params, rid=rid, return_logprob=True, stream=stream)


def output_logprobs(reply: GenerateReply) -> list[float]:
    return [entry[0] for entry in reply.meta_info.output_token_logprobs or () if entry[0] is not None]


@asynccontextmanager
async def contract(
    engine: str,
    folder: Path,
    *,
    pause_mode: PauseMode,
    joins: Sequence[str] = (),
    count: int = 1,
    tensor_parallel: int = 1,
) -> AsyncIterator[Contract]:
    """A run with `count` gservers of `engine`, which serve; `joins`: URLs of the SGLang servers that they join, which
    ask for a key, or sockets of the vLLM servers; `tensor_parallel`: ranks of each that is started."""
    config = contract_config(engine, folder, pause_mode, joins=joins, count=count, tensor_parallel=tensor_parallel)
    model_dir = ensure_checkpoint(config)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    async with managed(config) as run, AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(gserver_process(run, folder, index)) for index in range(count)]
        ended = [asyncio.create_task(process.ended()) for process in processes]
        live = asyncio.create_task(run.until(lambda s: live_gservers(s) == {*range(count)}, timeout=START_SECONDS))
        await asyncio.wait({*ended, live}, return_when=asyncio.FIRST_COMPLETED)
        for task, process in zip(ended, processes, strict=True):
            assert not task.done(), f"a gserver ended; its last words:\n{process.output[-4000:]}"
            task.cancel()
        live.result()
        urls = [(await run.process("gserver", index)).address for index in range(count)]
        control = ControlClient(run.url, secret=run.secret)
        publishers: dict[Way, Publisher] = {}

        def publisher(way: Way) -> Publisher:
            if way not in publishers:
                publishers[way] = publisher_for(config, control, way)
            return publishers[way]

        found = Contract(
            engine,
            urls,
            run=run,
            publisher=publisher,
            model=model,
            model_dir=model_dir,
            processes=processes,
        )
        try:
            yield found
        finally:
            for used in publishers.values():
                used.close()
            await control.close()
            await found.client.close()


def publisher_for(config: Config, control: ControlClient, way: Way) -> Publisher:
    """One that brings weights in the way of `weights.mode = way`; the manager takes them as they come."""
    return cpu_publisher(configuration.overridden(config, [f"weights.mode={way}"]), control)


@asynccontextmanager
async def gserver_process(run: Run, folder: Path, index: int) -> AsyncIterator[Command]:
    file = folder / "config.toml"
    file.write_text(configuration.to_toml(run.config))
    process = start_command(
        ["gserver", str(file), "--manager", run.url, "--index", str(index)],
        variables={"STREAMRL_LOG": "DEBUG"},
        shown=True,
    )
    try:
        yield process
    finally:
        process.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await process.ended()
        process.end()


def contract_config(
    engine: str, folder: Path, pause_mode: PauseMode, *, joins: Sequence[str], count: int, tensor_parallel: int
) -> Config:
    return small_config(
        folder,
        model=SCRATCH,
        data={"max_prompt_tokens": 64},
        rollout={"sampling": {"max_new_tokens": 128}},
        run={"dir": str(folder), "device": "cpu"},
        gserver={
            "engine": engine,
            "count": count,
            "max_context": MAX_CONTEXT,
            "max_running": MAX_RUNNING,
            "dtype": "float32",
            "api_key_env": KEY_VARIABLE if joins and engine == "sglang" else "",
            "sglang": {
                "python": sglang_python() or "",
                "addresses": list(joins) if engine == "sglang" else [],
                "tensor_parallel": tensor_parallel,
            },
            "vllm": {"python": vllm_python() or "", "addresses": list(joins) if engine == "vllm" else []},
        },
        weights={"mode": "collective", "bucket_mb": 0.05, "pause_mode": pause_mode},
        limits={"update_seconds": 30.0, "heartbeat_seconds": 0.2, "start_seconds": START_SECONDS},
    )
