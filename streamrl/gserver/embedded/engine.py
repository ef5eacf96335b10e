"""The embedded engine behind the server's interface, and its single thread of computation.

The thread takes commands between two steps, computes while there is work, and sleeps otherwise. It touches no asyncio
object: its outputs go to the event loop once a step.

New weights are written to the staged set, and a swap only exchanges it with the served one (`weights.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Self, TypeVar

import torch

from streamrl import essential
from streamrl.architecture import Architecture
from streamrl.checksum import WeightsChecksum
from streamrl.config import MAX_QUEUED, LoraConfig
from streamrl.device import compute_with, inference_dtype
from streamrl.errors import ModelError
from streamrl.gserver.embedded.adapters import Adapters
from streamrl.gserver.embedded.graphs import CudaRecorder, GraphedModel
from streamrl.gserver.embedded.model import KVCache, Model, SlotCache, StepModel, Unsupported, read_architecture
from streamrl.gserver.embedded.request import Request
from streamrl.gserver.embedded.scheduler import PREFILL_TOKENS, DeterministicScheduler, Event, Scheduler
from streamrl.gserver.embedded.weights import DoubleBufferedWeights
from streamrl.gserver.server.engine import GenerationFailed, Job, Output, QueueFull, Text, Ticket
from streamrl.gserver.server.http import EngineLimits, checked
from streamrl.gserver.server.receiver import (
    CLOSING_SECONDS,
    ExpectedWeights,
    StagedWeights,
    WeightReceiver,
    in_thread,
)
from streamrl.models import eos_token_ids
from streamrl.records.lineage import version_of
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION, GenerateRequest, PauseMode, SamplingParams
from streamrl.types import Generation

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
Result = TypeVar("Result")
SEED_BITS = 64
LOOKS = 4
"""Number of times that a thread has to be found in the same step before it counts as stuck."""
BURST_GAP = 0.1
"""Requests that reach an idle engine within this share of a decode step of each other are computed together."""


def _fast_architecture(folder: Path) -> Architecture | None:
    """Return the architecture of the model in `folder` if the fast engine computes it."""
    try:
        return read_architecture(folder)
    except Unsupported as error:
        log.info("%s; transformers computes it, more slowly", error)
        return None


def _weights_of(
    folder: Path,
    architecture: Architecture | None,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    threads: int,
    deterministic: bool,
) -> DoubleBufferedWeights:
    if architecture is None:
        from streamrl.gserver.embedded.general import GeneralWeights

        return GeneralWeights(
            folder, dtype=dtype, compute_dtype=compute_dtype, device=device, deterministic=deterministic
        )
    return DoubleBufferedWeights(
        architecture,
        dtype=dtype,
        compute_dtype=compute_dtype,
        device=device,
        threads=threads,
        deterministic=deterministic,
    )


def generation_of(output: Output) -> Generation:
    """Return a finished response with the policy version of each token; raises `GenerationFailed` if it was aborted."""
    finish = output.finish_reason
    if finish is None or finish.type == "abort":
        raise GenerationFailed("the response was aborted" if finish is None else f"aborted: {finish.message}")
    versions: list[int] = []
    for span in output.spans:
        version = 0 if span.version == INITIAL_WEIGHT_VERSION else version_of(span.version)
        versions.extend([version] * (span.end - span.start))
    return Generation(output.output_ids, output.logprobs, versions, finish.type, finish.matched)


class EmbeddedEngine:
    """Serves one model; `gserver.server.engine.Engine` documents its methods.

    As an async context manager it starts, and stops at the end of the block.
    """

    name = "embedded"

    def __init__(
        self,
        *,
        folder: Path,
        text: Text | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        threads: int = 1,
        max_running: int = 64,
        max_queued: int = MAX_QUEUED,
        max_context: int = 4096,
        seed: int = 0,
        version: str = INITIAL_WEIGHT_VERSION,
        update_timeout: float = 600.0,
        stuck_seconds: float = 60.0,
        deterministic: bool = False,
        prefill_tokens: int = PREFILL_TOKENS,
        prefix_cache_bytes: int = 256 * 2**20,
        lora: LoraConfig | None = None,
        adapter: Path | None = None,
        cuda_graphs: bool = True,
        overlap: bool = True,
    ) -> None:
        """`folder`: a Hugging Face checkpoint. `text`: its tokenizer; None: read from `folder`. `max_running`:
        responses that are computed together. `lora`:
        updates bring adapters of the model in `folder`; the first adapter is the one in `adapter`, or one that changes
        nothing if `adapter` is None. `cuda_graphs`: on a GPU, decode steps are recorded (`graphs.py`). `overlap`: then
        a decode step is launched before the tokens of the previous one are read."""
        compute_with(1)  # the engine computes in a separate thread
        self.model_path = str(folder)
        self._folder = folder
        self._eos_token_ids = eos_token_ids(folder)
        self._text = text or Text(folder)
        self._device = device
        self._threads = threads
        self.max_running = max_running
        self._capacity = max_running + max_queued
        self._random = random.Random(seed)
        compute_dtype = inference_dtype(dtype, device)
        if compute_dtype != dtype:
            log.info(
                "this processor only emulates %s: weights of it are kept and computed with in %s", dtype, compute_dtype
            )
        self._architecture = _fast_architecture(folder)
        """None: transformers computes the model."""
        self._weights = _weights_of(
            folder,
            self._architecture,
            dtype=dtype,
            compute_dtype=compute_dtype,
            device=device,
            threads=threads,
            deterministic=deterministic,
        )
        self.vocab_size, longest = self._weights.vocab_size, self._weights.max_position
        if max_context > longest:
            log.info("contexts end at %d tokens, for which the model was made", longest)
        self.max_context = min(max_context, longest)
        if lora is not None and self._architecture is None:
            raise ModelError(
                f"the embedded engine has no adapters of models that transformers computes, such as {folder}; "
                'set weights.lora = "merged"'
            )
        self._adapters = Adapters(self._weights.served, lora) if lora is not None else None
        self._first_adapter = adapter
        graphs = cuda_graphs and device.type == "cuda" and not deterministic
        model, cache, scheduler = self._computation(deterministic, graphs=graphs, compute_dtype=compute_dtype)
        self._scheduler = scheduler(
            model=model,
            cache=cache,
            max_running=max_running,
            version=version,
            prefill_tokens=prefill_tokens,
            prefix_cache_bytes=prefix_cache_bytes,
            adapter=self._adapters.served if self._adapters is not None else None,
            overlap=overlap,
        )
        self._updated: DoubleBufferedWeights | Adapters = self._adapters or self._weights
        """The part of the model that updates change."""
        self.receiver = WeightReceiver(
            expected=ExpectedWeights(shapes=self._updated.shapes, dtype=dtype, ignored=self._updated.ignored),
            aside=self._updated,
            device=device,
            timeout=update_timeout,
        )
        # No SimpleQueue: Python 3.11's `get` waits forever if its timeout expires between two attempts at its lock.
        self._commands: Queue[Callable[[], object] | None] = Queue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_began: float | None = None
        """When the thread began its present step; None: it waits for work."""
        self._stuck_seconds = stuck_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tickets: set[Ticket] = set()
        self._broken = asyncio.Event()
        self._broken_by = ""
        self._requests_total = 0
        self._weight_updates = 0
        self._freeing: asyncio.Task[None] | None = None
        """The release of the previously served weights; generation does not wait for it."""
        self._pause_seconds = 0.0
        self._pause_mode: PauseMode = "in_place"
        """Mode of the latest pause."""
        self._paused_at: float | None = None

    def _computation(
        self, deterministic: bool, *, graphs: bool, compute_dtype: torch.dtype
    ) -> tuple[StepModel, SlotCache, type[Scheduler]]:
        """Return the forward pass, its cache, and the kind of the scheduler."""
        slots = self.max_running + 1  # one is for prompts that are only scored
        if self._architecture is None:
            from streamrl.gserver.embedded.general import computation_with

            return computation_with(self._weights, slots=slots, max_length=self.max_context)
        graphs = graphs and self._architecture.moe is None
        cache = KVCache(
            self._architecture,
            max_slots=slots,
            max_length=self.max_context,
            dtype=compute_dtype,
            device=self._device,
            spare=int(graphs),
        )
        weights, longest = self._weights.served, self.max_context
        if graphs:
            record = CudaRecorder(self._device)
            return GraphedModel(weights, cache, max_length=longest, record=record), cache, Scheduler
        model = Model(weights, cache, max_length=longest, copies_cache=deterministic)
        return model, cache, DeterministicScheduler if deterministic else Scheduler

    @property
    def weight_version(self) -> str:
        return self._scheduler.version

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
    ) -> list[Generation]:
        """Return a response to each of `prompts`, which are token ids; with `params.n`, so many, one after another.

        `params`: for all prompts, or for each. Raises `Refused` for a prompt or a parameter that is not possible,
        `QueueFull`, and `GenerationFailed` if the engine breaks or a response is aborted.
        """
        if not prompts:
            return []
        request = GenerateRequest(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=params if isinstance(params, SamplingParams) else list(params),
        )
        limits = EngineLimits(vocab_size=self.vocab_size, max_context=self.max_context)
        tickets: list[Ticket] = []
        try:
            for job in checked(request, limits=limits, text=self._text).jobs:
                tickets.append(self.submit(job))
            return [generation_of(await ticket.result()) for ticket in tickets]
        finally:
            for ticket in tickets:
                if not ticket.done:
                    self._commands.put(partial(self._scheduler.abort, ticket.job.rid))

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._do(self._load_first)

    async def failed(self) -> None:
        watching = essential.begin(self._break_when_stuck(), name="the watch over the engine's thread")
        try:
            await self._broken.wait()
        finally:
            watching.cancel()
        raise ModelError(self._broken_by)

    async def close(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, CLOSING_SECONDS)
        await self.receiver.close()
        self._fail_all("the gserver is stopping")

    def submit(self, job: Job) -> Ticket:
        if len(self._tickets) >= self._capacity:
            raise QueueFull(
                f"{len(self._tickets)} requests are running or waiting, no more are taken; try again later, "
                "or start more gservers"
            )
        ticket = Ticket(job)
        seed = job.params.sampling_seed
        request = Request(
            ticket,
            eos_token_ids=self._eos_token_ids,
            seed=self._random.getrandbits(SEED_BITS) if seed is None else seed % 2**SEED_BITS,
            decode=partial(self._text.decode, skip_special_tokens=False),  # as SGLang looks for stop strings
        )
        self._tickets.add(ticket)
        self._requests_total += 1
        self._commands.put(lambda: self._scheduler.submit(request))
        return ticket

    async def abort(self, rid: str) -> bool:
        return await self._do(lambda: self._scheduler.abort(rid))

    async def abort_all(self) -> int:
        return await self._do(self._scheduler.abort_all)

    async def pause(self, mode: PauseMode) -> None:
        self._pause_mode = mode
        await self._do(lambda: self._scheduler.pause(mode))
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    async def resume(self) -> None:
        await self._do(self._scheduler.resume)
        if self._paused_at is not None:
            self._pause_seconds += time.monotonic() - self._paused_at
            self._paused_at = None

    async def end_update(self) -> str:
        staged = await self.receiver.take()
        return await self.receiver.apart(lambda: self._swap(staged))

    async def load(self, folder: Path, version: str | None) -> str:
        if self.receiver.begun:
            await self.receiver.load(folder, version)
            return f"the weights in {folder} wait for /end_weight_update"
        if self._adapters is None and self._architecture != _fast_architecture(folder):
            raise ModelError(f"the model in {folder} has another architecture than the one served, {self._folder}")

        async def replace() -> str:
            await self.receiver.discard()
            await in_thread(lambda: self._updated.load_staged(folder))
            if self._adapters is None:
                self.model_path = str(folder)
            return await self._swap(StagedWeights(version=version))

        return await self.receiver.apart(replace)

    async def set_version(self, version: str) -> None:
        await self._do(lambda: self._scheduler.set_version(version))

    async def checksum(self) -> WeightsChecksum:
        return await self.receiver.exclusively(self._updated.checksum)

    def stats(self) -> dict[str, float]:
        scheduler = self._scheduler
        running = scheduler.occupied
        paused = time.monotonic() - self._paused_at if self._paused_at is not None else 0.0
        return {
            "running": float(running),
            "queued": float(max(0, len(self._tickets) - running)),
            "tokens_generated_total": float(scheduler.tokens_generated),
            "prompt_tokens_total": float(scheduler.prompt_tokens),
            "prompt_tokens_cached_total": float(scheduler.prompt_tokens_cached),
            "decode_steps_total": float(scheduler.decode_steps),
            "busy_seconds_total": scheduler.busy_seconds,
            "slot_seconds_total": scheduler.slot_seconds,
            "requests_total": float(self._requests_total),
            "pause_seconds_total": self._pause_seconds + paused,
            "weight_updates_total": float(self._weight_updates),
            "cache_bytes": float(scheduler.cache_bytes),
            "adapters": float(scheduler.adapters),
            "step_seconds": time.monotonic() - (self._step_began or time.monotonic()),
        }

    async def _break_when_stuck(self) -> None:
        """Break the engine when its thread is found `LOOKS` times in the same step.

        If this whole process had stood still, the thread would be found in it only once.
        """
        looks, began = 0, self._step_began
        while looks < LOOKS:
            await asyncio.sleep(self._stuck_seconds / LOOKS)
            same = began is not None and began == self._step_began
            looks, began = looks + 1 if same else 0, self._step_began
        frame = sys._current_frames().get(self._thread.ident or 0)
        log.error("the engine's thread is stuck here:\n%s", "".join(traceback.format_stack(frame)))
        self._break(f"it has finished no step for {self._stuck_seconds:g} s (limits.stuck_seconds)")

    async def _swap(self, staged: StagedWeights) -> str:
        """Serve the staged weights, which are complete; return a description."""

        def swap() -> float:
            began = time.perf_counter()
            if staged.abort_all_requests:
                self._scheduler.abort_all()
            going_on = not self._scheduler.paused
            if going_on:  # a call to resume came before this one: the pause's mode still applies
                self._scheduler.pause(self._pause_mode)
            if self._adapters is not None:
                self._scheduler.new_adapter(self._adapters.swap(), staged.version)
            else:
                self._scheduler.new_weights(self._weights.swap(), staged.version)
            if going_on:
                self._scheduler.resume()
            return time.perf_counter() - began

        seconds = await self._do(swap)
        self._freeing = asyncio.create_task(in_thread(self._weights.free_retired))
        self._weight_updates += 1
        return f"{len(self._updated.shapes)} tensors swapped in within {seconds:.4f} s"

    def _load_first(self) -> None:
        self._weights.load_served(self._folder)
        if self._adapters is not None and self._first_adapter is not None:
            self._adapters.load_served(self._first_adapter)
            self._scheduler.new_adapter(self._adapters.served, None)

    async def _do(self, command: Callable[[], Result]) -> Result:
        """Run `command` in the engine's thread between two steps; return its result."""
        assert self._loop is not None, "start() comes first"
        loop = self._loop
        if not self._thread.is_alive():
            raise ModelError(self._broken_by or "the engine has stopped")
        future: asyncio.Future[Result] = loop.create_future()

        def resolve(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            try:
                result = command()
            except Exception as error:  # tolerance point: the error belongs to the caller, not to the thread
                loop.call_soon_threadsafe(resolve, None, error)
            else:
                loop.call_soon_threadsafe(resolve, result, None)

        self._commands.put(run)
        return await future

    def _run(self) -> None:
        try:
            self._compute()
        except BaseException as error:  # tolerance point: no other code sees the error that ends a thread
            log.exception("the engine's thread has ended")
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._break, f"{type(error).__name__}: {error}")

    def _break(self, reason: str) -> None:
        """Fail all requests: the thread is gone, or hangs, and computes nothing any more."""
        self._broken_by = f"the engine has stopped: {reason}"
        self._broken.set()
        self._fail_all(self._broken_by)

    def _fail_all(self, message: str) -> None:
        for ticket in self._tickets:
            ticket.fail(message)
        self._tickets.clear()

    def _compute(self) -> None:
        compute_with(self._threads)
        with torch.inference_mode():
            while True:
                self._step_began = time.monotonic()
                for command in self._take_commands():
                    if command is None:
                        return
                    command()
                if not self._scheduler.idle:
                    self._scheduler.step()
                self._report()

    def _take_commands(self) -> Iterator[Callable[[], object] | None]:
        """Yield all commands in the queue; None stops the thread.

        If there is nothing to compute, wait for one, and then for those that soon follow it: requests come in bursts,
        and a step for the first ones alone would delay the others.
        """
        was_idle = self._scheduler.idle
        if was_idle:
            self._step_began = None
            command = self._commands.get()
            self._step_began = time.monotonic()
            yield command
        if self._scheduler.idle:
            return
        step = self._scheduler.decode_seconds if was_idle else 0.0
        latest = time.perf_counter() + step
        try:
            while True:
                wait = step * BURST_GAP if time.perf_counter() < latest else 0.0
                yield self._commands.get(timeout=wait) if wait else self._commands.get_nowait()
        except Empty:
            return

    def _report(self) -> None:
        events, self._scheduler.events = self._scheduler.events, []
        if events and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Sequence[Event]) -> None:
        for ticket, news in events:
            if isinstance(news, str):
                ticket.fail(news)
            else:
                ticket.deliver(news)
            if ticket.done:
                self._tickets.discard(ticket)
