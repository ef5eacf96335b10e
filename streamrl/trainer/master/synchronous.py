"""Generation and scoring in a synchronous graph: the MFCs that rollout workers carry out for the master.

Only the buffer decides how many groups a batch lacks, since workers' replies are incomplete: a worker may store groups
and die before it replies, or score a group that another one has stored in the meantime.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeVar

from streamrl.config import Config
from streamrl.errors import PeerLost
from streamrl.trainer.graph import Graph
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.trainer.master.figures import Span
from streamrl.transport.request_reply import FIRST_ROLLOUT_WORKER, Requests
from streamrl.transport.synchronous import (
    GenerateGroups,
    GenerateGroupsReply,
    RolloutCall,
    ScoreGroups,
    ScoreGroupsReply,
)
from streamrl.waits import first_of

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")

NEWS_SECONDS = 1.0
"""Time in which the notice of a stored group arrives, unless the group was trained on before."""


class SynchronousGeneration:
    """`actor_gen`, and `rew_inf` by verifiers: the MFCs that rollout workers carry out for the master."""

    def __init__(self, graph: Graph, *, channel: Requests, buffer: AsyncIOSequenceBuffer, config: Config) -> None:
        self._channel = channel
        self._buffer = buffer
        self._workers = [FIRST_ROLLOUT_WORKER + index for index in range(config.rollout.workers)]
        self._names = {mfc.interface: mfc.name for mfc in graph.of_rollout}
        self._timeout = config.limits.call_seconds

    async def make(self, groups: int) -> list[Span]:
        """Have groups generated, scored and stored until a batch of `groups` is complete; return the spans of these
        calls."""
        await self._channel.wait_for(set(self._workers), patience=self._timeout)
        spans: list[Span] = []
        while self._buffer.batch_awaited:
            if len(self._buffer) >= groups:  # the master is about to form the batch, or to drop groups of too great age
                await self._buffer.until(lambda: len(self._buffer) < groups or not self._buffer.batch_awaited)
            else:
                await self._round(groups, spans)
        return spans

    async def _round(self, groups: int, spans: list[Span]) -> None:
        """Have the groups that a batch of `groups` lacks generated, then scored. Some may fail."""
        begin = time.time()
        waiting = await self._generate(groups)
        middle = time.time()
        if waiting:
            stored = await self._score(waiting)
            spans.append(Span(self._names["generate"], begin, middle))
            if "inference" in self._names:
                spans.append(Span(self._names["inference"], middle, time.time()))
            heard = self._buffer.until(
                lambda: not self._buffer.batch_awaited or all(seq in self._buffer for seq in stored)
            )
            await first_of(heard, timeout=NEWS_SECONDS)

    async def _generate(self, groups: int) -> dict[int, list[int]]:
        """Have groups generated until the held groups and the groups to be scored make a batch; return the latter by
        worker."""
        waiting: dict[int, list[int]] = {}

        def lacking() -> int:
            return groups - len(self._buffer) - sum(map(len, waiting.values()))

        while lacking() > 0:
            living = await self._channel.living(self._workers, patience=self._timeout)
            for gone in waiting.keys() - set(living):
                del waiting[gone]
            await self._ask_for_more(lacking, living, waiting)
        if len(self._buffer) >= groups:  # groups that seemed lost had been stored; those to be scored keep waiting
            return {}
        return {worker: seqs for worker, seqs in waiting.items() if seqs}

    async def _ask_for_more(
        self, lacking: Callable[[], int], living: Sequence[int], waiting: dict[int, list[int]]
    ) -> None:
        """Request from each of the workers `living` its share of the lacking groups; their replies go into `waiting`.

        Returns as soon as groups arrive or none is lacking. Workers that have not replied by then may be waiting for
        groups that are not needed any more.
        """
        short, held = lacking(), len(self._buffer)

        async def ask(worker: int, count: int) -> None:
            reply = await self._ask(worker, GenerateGroups(count), GenerateGroupsReply)
            waiting[worker] = reply.seqs if reply is not None else []
            self._buffer.wake()

        asking: list[Coroutine[None, None, None]] = []
        for i, worker in enumerate(living):
            share = short * (i + 1) // len(living) - short * i // len(living)
            if count := share + len(waiting.get(worker, ())):
                asking.append(ask(worker, count))
        await first_of(_all(asking), self._buffer.until(lambda: lacking() <= 0 or len(self._buffer) > held))

    async def _score(self, waiting: Mapping[int, list[int]]) -> set[int]:
        """Have groups scored by the workers that hold them; return the groups that are stored according to the workers'
        replies."""
        stored: set[int] = set()

        async def ask(worker: int, seqs: list[int]) -> None:
            reply = await self._ask(worker, ScoreGroups(seqs), ScoreGroupsReply)
            stored.update(reply.seqs if reply is not None else ())

        await _all([ask(worker, seqs) for worker, seqs in waiting.items()])
        return stored

    async def _ask(self, worker: int, call: RolloutCall, reply: type[Reply]) -> Reply | None:
        """Return the reply, or None if the worker has died; the manager then issues its prompts to another worker."""
        try:
            return await self._channel.call(worker, call, reply, timeout=self._timeout)
        except PeerLost as error:
            log.warning("%s; its groups are made again", error)
            return None


async def _all(works: Iterable[Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)
