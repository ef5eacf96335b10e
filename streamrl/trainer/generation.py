"""Generation and scoring in a synchronous graph: the MFCs that rollout workers carry out for the master."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from streamrl.config import Config
from streamrl.errors import PeerLost
from streamrl.trainer.graph import Graph
from streamrl.trainer.span import Span
from streamrl.transport.directing import FIRST_ROLLOUT_WORKER, Generate, Generated, Score, Scored
from streamrl.transport.request_reply import RequestChannel

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")


class Generation:
    """`actor_gen`, and `rew_inf` by verifiers: the MFCs that rollout workers carry out for the master."""

    def __init__(self, graph: Graph, *, channel: RequestChannel[object], config: Config) -> None:
        self._channel = channel
        self._workers = [FIRST_ROLLOUT_WORKER + index for index in range(config.rollout.workers)]
        self._scores = any(mfc.interface == "inference" for mfc in graph.of_rollout)
        self._timeout = config.trainer.step_timeout_seconds

    async def make(self, groups: int, *, formed: asyncio.Event) -> list[Span]:
        """Have `groups` groups generated, scored and stored; what fails is made up for until the batch is `formed`."""
        await self._channel.wait_for(set(self._workers), patience=self._timeout)
        spans: list[Span] = []
        missing = groups
        forming = asyncio.create_task(formed.wait())
        try:
            while missing > 0:
                making = asyncio.create_task(self._round(missing, spans))
                await asyncio.wait({making, forming}, return_when=asyncio.FIRST_COMPLETED)
                if not making.done() and missing < groups:
                    making.cancel()  # what was taken for lost had been stored after all
                    break
                missing -= await making
        finally:
            forming.cancel()
        return spans

    async def _round(self, groups: int, spans: list[Span]) -> int:
        """Ask all living rollout workers for their share; answers how many groups are stored."""
        living = await self._channel.living(self._workers, patience=self._timeout)
        count = len(living)
        shares = [groups * (i + 1) // count - groups * i // count for i in range(count)]
        begin = time.time()
        generated = await self._ask(
            {worker: Generate(share) for worker, share in zip(living, shares, strict=True) if share}, Generated
        )
        middle = time.time()
        scored = await self._ask({worker: Score(reply.seqs) for worker, reply in generated.items()}, Scored)
        spans.append(Span("actor_gen", begin, middle))
        if self._scores:
            spans.append(Span("rew_inf", middle, time.time()))
        return sum(len(reply.seqs) for reply in scored.values())

    async def _ask(self, calls: Mapping[int, msgspec.Struct], reply: type[Reply]) -> dict[int, Reply]:
        """The replies of those that live; the manager gives the groups of the others to somebody else."""

        async def ask(worker: int, call: msgspec.Struct) -> Reply | None:
            try:
                return await self._channel.call(worker, call, reply, timeout=self._timeout)
            except PeerLost as error:
                log.warning("%s; its groups are made anew", error)
                return None

        answers = await asyncio.gather(*(ask(worker, call) for worker, call in calls.items()))
        return {worker: answer for worker, answer in zip(calls, answers, strict=True) if answer is not None}
