"""Runs the graph: each MFC as soon as its data are ready, on the model workers that hold them.

`arrivals` MFCs run in loops of their own while groups come in; `run_batch` takes one training
batch through the `batch` MFCs, those that do not need each other at the same time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from streamrl.trainer.buffer import SequenceBuffer
from streamrl.trainer.calls import Done, Infer
from streamrl.trainer.graph import MFC, STREAM_KEYS, Graph
from streamrl.transport.request_reply import RequestChannel
from streamrl.types import SampleMeta


class Span(msgspec.Struct, frozen=True):
    """What one MFC took."""

    name: str
    begin: float
    """Seconds since the epoch."""
    end: float
    compute_seconds: float
    """Of that, computing on the slowest worker."""


TrainBatch = Callable[[Sequence[SampleMeta]], Awaitable[float]]
"""Carries out `actor_train` on a batch; answers its compute seconds."""


class FunctionExecutor:
    """Drives the MFCs of one graph over one buffer."""

    def __init__(
        self,
        *,
        graph: Graph,
        buffer: SequenceBuffer,
        channel: RequestChannel[object],
        train: TrainBatch,
        arrivals_limit: int,
        timeout: float,
    ) -> None:
        self._graph = graph
        self._buffer = buffer
        self._channel = channel
        self._train = train
        self._limit = arrivals_limit
        self._timeout = timeout
        self._spans: list[Span] = []

    def take_spans(self) -> list[Span]:
        """What ran since the last time this was asked."""
        spans, self._spans = self._spans, []
        return spans

    async def run_arrivals(self) -> None:
        """Run the `arrivals` MFCs for ever."""
        async with asyncio.TaskGroup() as tasks:
            for mfc in self._graph.reading("arrivals"):
                tasks.create_task(self._run_arrivals_of(mfc), name=mfc.name)

    async def run_batch(self, batch: Sequence[SampleMeta]) -> list[Span]:
        """Take `batch` through the `batch` MFCs; answers their spans."""
        done: set[str] = set(self._graph.arrival_keys)
        waiting = self._graph.reading("batch")
        spans: list[Span] = []
        while waiting:
            ready = [mfc for mfc in waiting if mfc.inputs <= done]
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._run(mfc, batch), name=mfc.name) for mfc in ready]
            spans += [task.result() for task in running]
            done.update(STREAM_KEYS, *(mfc.outputs for mfc in ready))
            waiting = [mfc for mfc in waiting if mfc not in ready]
        self._spans += spans
        return spans

    async def _run_arrivals_of(self, mfc: MFC) -> None:
        while True:
            metas = await self._buffer.take_arrivals(mfc.name, mfc.inputs, limit=self._limit)
            self._spans.append(await self._run(mfc, metas))
            await self._buffer.amend_batch([meta.seq for meta in metas], mfc.outputs)

    async def _run(self, mfc: MFC, metas: Sequence[SampleMeta]) -> Span:
        begin = time.time()
        if mfc.name == "actor_train":
            compute = await self._train(metas)
        else:
            compute = await self._infer(mfc, metas)
        return Span(mfc.name, begin, time.time(), compute)

    async def _infer(self, mfc: MFC, metas: Sequence[SampleMeta]) -> float:
        calls = [
            self._channel.call(head, Infer(mfc.name, seqs), Done, timeout=self._timeout)
            for head, seqs in by_head(metas).items()
        ]
        return max(done.compute_seconds for done in await asyncio.gather(*calls))


def by_head(metas: Sequence[SampleMeta]) -> dict[int, list[int]]:
    """Data-parallel rank → sequence numbers that it holds."""
    heads: dict[int, list[int]] = {}
    for meta in metas:
        heads.setdefault(meta.head, []).append(meta.seq)
    return heads
