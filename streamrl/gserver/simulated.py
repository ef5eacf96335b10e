"""A simulated engine: no model, random tokens, long-tailed lengths and times.

It implements the whole contract of `gserver.server.engine.Engine` (slots, queue, pauses, versions; it joins weight
groups, receives tensors, and discards them), so that all code around an engine can be tried with hundreds of requests
on one processor. Each running request has one timer; its tokens so far follow from the clock.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import torch

from streamrl.checksum import WeightsChecksum
from streamrl.config import MAX_QUEUED, PACE_SIGMA, SimulationConfig
from streamrl.gserver.server.engine import Engine, Job, Output, QueueFull, Text, Ticket
from streamrl.gserver.server.receiver import WeightReceiver
from streamrl.gserver.server.serving import GserverLaunch, behind_http
from streamrl.transport.generation import (
    INITIAL_WEIGHT_VERSION,
    FinishReason,
    PauseMode,
    VersionSpan,
)

ANY_TOKEN = 2**31
"""Vocabulary size. Prompts come from the tokenizer of some model; their tokens are not examined."""


def serve(launch: GserverLaunch) -> AbstractAsyncContextManager[tuple[Engine, str]]:
    """Return the context in which the engine and its URL exist."""
    config, settings = launch.config, launch.config.gserver
    engine = SimulatedEngine(
        settings.simulation,
        model_path=str(launch.model_dir),
        max_running=settings.max_running,
        max_queued=MAX_QUEUED,
        max_context=settings.max_context,
        seed=launch.seed,
        version=launch.version,
        update_timeout=config.limits.update_seconds,
    )
    return behind_http(engine, launch, text=Text(launch.model_dir))


class _SimulatedJob:
    """A job in the engine: its length, its speed, and its progress."""

    def __init__(self, ticket: Ticket, settings: SimulationConfig, *, seed: int, version: str) -> None:
        params = ticket.job.params
        self.ticket = ticket
        self.random = random.Random(seed)
        self.pace = settings.token_seconds * math.exp(self.random.gauss(0.0, PACE_SIGMA))
        location = math.log(settings.mean_length) - settings.sigma**2 / 2
        drawn = round(math.exp(self.random.gauss(location, settings.sigma)))
        self.stops = not params.ignore_eos and max(drawn, params.min_new_tokens, 1) < params.max_new_tokens
        self.length = max(drawn, params.min_new_tokens, 1) if self.stops else params.max_new_tokens
        self.produced = 0
        self.tokens: list[int] = []
        self.retractions = 0
        self.versions = [(version, 0)]
        self.since = 0.0
        """When it began to run, or when its last counted token was made."""
        self.timer: asyncio.TimerHandle | None = None

    def advance(self, now: float) -> int:
        """Count the tokens made until `now`; return the number of new ones."""
        new = min(int((now - self.since) / self.pace), self.length - self.produced)
        self.produced += new
        self.since += new * self.pace
        return new

    def complete(self) -> int:
        """Count all remaining tokens; return their number."""
        new = self.length - self.produced
        self.produced = self.length
        return new

    def note_version(self, version: str) -> None:
        if self.versions[-1][1] == self.produced:
            self.versions.pop()
        self.versions.append((version, self.produced))


class SimulatedEngine:
    """See the module's docstring; all methods run on the event loop."""

    name = "simulated"

    def __init__(
        self,
        settings: SimulationConfig,
        *,
        model_path: str,
        max_running: int,
        max_queued: int,
        max_context: int,
        seed: int,
        version: str = INITIAL_WEIGHT_VERSION,
        update_timeout: float,
    ) -> None:
        self.model_path = model_path
        self.vocab_size = ANY_TOKEN
        self.max_context = max_context
        self._settings = settings
        self.max_running = max_running
        self._max_queued = max_queued
        self._random = random.Random(seed)
        self._version = version
        self._running: dict[str, _SimulatedJob] = {}
        self._waiting: deque[_SimulatedJob] = deque()
        self._paused_at: float | None = None
        self.receiver = WeightReceiver(expected=None, aside=None, device=torch.device("cpu"), timeout=update_timeout)
        self._counted_until = time.monotonic()
        self._totals = dict.fromkeys(
            ("tokens_generated", "prompt_tokens", "busy_seconds", "slot_seconds", "requests", "weight_updates"), 0.0
        )
        self._pause_seconds = 0.0

    @property
    def weight_version(self) -> str:
        return self._version

    async def start(self) -> None:
        self._counted_until = time.monotonic()

    async def failed(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self.receiver.close()
        for request in [*self._running.values(), *self._waiting]:
            self._stop_timer(request)
            request.ticket.fail("the gserver is stopping")
        self._running.clear()
        self._waiting.clear()

    def submit(self, job: Job) -> Ticket:
        if len(self._running) + len(self._waiting) >= self.max_running + self._max_queued:
            raise QueueFull(
                f"{len(self._running) + len(self._waiting)} requests are running or waiting, no more are taken; "
                "try again later, or start more gservers"
            )
        ticket = Ticket(job)
        seed = job.params.sampling_seed
        seed = self._random.getrandbits(64) if seed is None else seed
        self._waiting.append(_SimulatedJob(ticket, self._settings, seed=seed, version=self._version))
        self._totals["requests"] += 1
        self._admit()
        return ticket

    async def abort(self, rid: str) -> bool:
        found = [r for r in [*self._running.values(), *self._waiting] if r.ticket.job.rid == rid]
        self._abort(found)
        return bool(found)

    async def abort_all(self) -> int:
        found = [*self._running.values(), *self._waiting]
        self._abort(found)
        return len(found)

    async def pause(self, mode: PauseMode) -> None:
        self._count()
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        for request in self._running.values():
            self._stop_timer(request)
        if mode == "abort":
            await self.abort_all()
        elif mode == "retract":
            for request in reversed(self._running.values()):
                request.retractions += 1
                self._waiting.appendleft(request)
            self._running.clear()

    async def resume(self) -> None:
        if self._paused_at is None:
            return
        self._count()
        self._pause_seconds += time.monotonic() - self._paused_at
        self._paused_at = None
        for request in self._running.values():
            self._start_timer(request)
        self._admit()

    async def end_update(self) -> str:
        staged = await self.receiver.take()
        if staged.abort_all_requests:
            await self.abort_all()
        if staged.version is not None:
            await self.set_version(staged.version)
        self._totals["weight_updates"] += 1
        return "a simulated engine has no weights to swap"

    async def load(self, folder: Path, version: str | None) -> str:
        if self.receiver.begun:
            await self.receiver.load(folder, version)
            return "a simulated engine has no weights to load"
        if version is not None:
            await self.set_version(version)
        self.model_path = str(folder)
        self._totals["weight_updates"] += 1
        return "a simulated engine has no weights to load"

    async def set_version(self, version: str) -> None:
        self._count()
        self._version = version
        for request in [*self._running.values(), *self._waiting]:
            request.note_version(version)

    async def checksum(self) -> WeightsChecksum:
        return WeightsChecksum(dtype="none", total=self._version, tensors={})

    def stats(self) -> dict[str, float]:
        self._count()
        paused = time.monotonic() - self._paused_at if self._paused_at is not None else 0.0
        return {
            "running": float(len(self._running)),
            "queued": float(len(self._waiting)),
            "running_tokens": float(sum(r.produced + len(r.ticket.job.input_ids) for r in self._running.values())),
            **{f"{name}_total": total for name, total in self._totals.items()},
            "pause_seconds_total": self._pause_seconds + paused,
        }

    def _admit(self) -> None:
        """Fill free slots from the queue."""
        self._count_seconds()
        while self._waiting and self._paused_at is None and len(self._running) < self.max_running:
            request = self._waiting.popleft()
            self._running[request.ticket.job.rid] = request
            self._totals["prompt_tokens"] += len(request.ticket.job.input_ids)
            request.since = time.monotonic()
            self._start_timer(request)

    def _count(self) -> None:
        """Bring the tokens of running requests and the totals up to date, for methods that need all of them."""
        self._count_seconds()
        for request in self._running.values():
            if self._paused_at is None:
                self._totals["tokens_generated"] += request.advance(self._counted_until)
            else:
                request.since = self._counted_until

    def _count_seconds(self) -> None:
        """Bring the time totals up to date, before the set of running requests changes."""
        now = time.monotonic()
        if self._paused_at is None:
            seconds = now - self._counted_until
            self._totals["busy_seconds"] += seconds if self._running else 0.0
            self._totals["slot_seconds"] += seconds * len(self._running)
        self._counted_until = now

    def _start_timer(self, request: _SimulatedJob) -> None:
        """Wake at the last token, or at the next reported one of a stream."""
        job, left = request.ticket.job, request.length - request.produced
        if job.stream:
            left = min(job.stream_interval, left)
        loop = asyncio.get_running_loop()
        delay = max(0.0, request.since + left * request.pace - time.monotonic())
        request.timer = loop.call_later(delay, self._wake, request)

    def _stop_timer(self, request: _SimulatedJob) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None

    def _wake(self, request: _SimulatedJob) -> None:
        self._count_seconds()
        self._totals["tokens_generated"] += request.advance(self._counted_until)
        if not request.ticket.job.stream or request.produced == request.length:
            self._totals["tokens_generated"] += request.complete()
            reason = FinishReason(type="stop") if request.stops else FinishReason(type="length", length=request.length)
            self._finish(request, reason)
            self._admit()
            return
        request.ticket.deliver(self._output(request, None))
        self._start_timer(request)

    def _abort(self, requests: list[_SimulatedJob]) -> None:
        self._count()
        for request in requests:
            self._finish(request, FinishReason(type="abort", message="aborted on request"))
        self._admit()

    def _finish(self, request: _SimulatedJob, reason: FinishReason) -> None:
        self._stop_timer(request)
        if self._running.pop(request.ticket.job.rid, None) is None:
            self._waiting.remove(request)
        request.ticket.deliver(self._output(request, reason))

    def _output(self, request: _SimulatedJob, reason: FinishReason | None) -> Output:
        job = request.ticket.job
        missing = request.produced - len(request.tokens)
        request.tokens += request.random.choices(range(self._settings.vocab_size), k=missing)
        logprob = -math.log(self._settings.vocab_size)
        ends = [start for _, start in request.versions[1:]] + [request.produced]
        asked = len(job.input_ids) - job.logprob_start_len if job.logprob_start_len >= 0 else 0
        top = [(logprob, token) for token in range(min(job.top_logprobs_num, self._settings.vocab_size))]
        return Output(
            output_ids=list(request.tokens),
            logprobs=[logprob] * request.produced,
            weight_version=self._version,
            finish_reason=reason,
            spans=[
                VersionSpan(version=version, start=start, end=end)
                for (version, start), end in zip(request.versions, ends, strict=True)
                if end > start
            ],
            top_logprobs=[top] * request.produced if top else [],
            input_logprobs=[None if i == 0 and job.logprob_start_len == 0 else logprob for i in range(asked)],
            input_top_logprobs=[top] * max(asked, 0) if top else [],
            num_retractions=request.retractions,
        )
