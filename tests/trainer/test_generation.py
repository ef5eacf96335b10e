"""The master's side of generation in a synchronous graph: what becomes of groups whose worker dies."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from streamrl.config import from_dict
from streamrl.errors import DeadlineExceeded
from streamrl.trainer.generation import Generation
from streamrl.trainer.graph import graph_of
from streamrl.transport import request_reply
from streamrl.transport.directing import (
    FIRST_ROLLOUT_WORKER,
    Direction,
    Generate,
    Generated,
    Score,
    Scored,
    name_on_channel,
)
from streamrl.transport.request_reply import ReplyChannel, RequestChannel


class Rollout:
    """A rollout worker over a real socket; `mute` calls of it, by type, are never answered."""

    def __init__(self, endpoint, index, ledger, *, mute=(), scores=None):
        self.asked: list[Direction] = []
        self.silent = asyncio.Event()
        self._ledger, self._mute, self._scores = ledger, mute, scores
        self._channel = ReplyChannel(endpoint=endpoint, worker=FIRST_ROLLOUT_WORKER + index, call_type=Generate | Score)
        self._following = asyncio.create_task(self._follow())

    async def _follow(self):
        while True:
            call_id, call = await self._channel.receive()
            self.asked.append(call)
            if type(call) in self._mute:
                self.silent.set()
            elif isinstance(call, Generate):
                await self._channel.reply(call_id, Generated([next(self._ledger) for _ in range(call.groups)]))
            else:
                stored = call.seqs if self._scores is None else [seq for seq in call.seqs if self._scores(seq)]
                await self._channel.reply(call_id, Scored(stored))

    async def die(self):
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._channel.close()


@contextlib.asynccontextmanager
async def rollout_pool(*kinds, timeout=60.0):
    """The master's end, and one worker for each of `kinds` (arguments of `Rollout`)."""
    config = from_dict(
        {
            "trainer": {"graph": "synchronous", "step_timeout_seconds": timeout},
            "staleness": {"max_staleness": 0},
            "rollout": {"workers": len(kinds)},
        }
    )
    channel = RequestChannel(host="127.0.0.1", notice_type=Scored, on_notice=lambda *_: None, name_of=name_on_channel)
    ledger = iter(range(1_000))
    workers = [Rollout(channel.endpoint, index, ledger, **kind) for index, kind in enumerate(kinds)]
    generation = Generation(graph_of(config), channel=channel, config=config)
    try:
        yield generation, workers, lambda index, **kind: Rollout(channel.endpoint, index, ledger, **kind)
    finally:
        for worker in workers:
            await worker.die()
        await channel.close()


def generated(worker):
    return sum(call.groups for call in worker.asked if isinstance(call, Generate))


def scored(worker):
    return [seq for call in worker.asked if isinstance(call, Score) for seq in call.seqs]


async def test_a_batch_is_dealt_to_all_workers_and_scored_after_all_of_it_is_generated():
    async with rollout_pool({}, {}) as (generation, workers, _):
        spans = await generation.make(7, formed=asyncio.Event())
        assert [generated(worker) for worker in workers] == [3, 4]
        assert sorted(scored(workers[0]) + scored(workers[1])) == list(range(7))
        assert [span.name for span in spans] == ["actor_gen", "rew_inf"]
        assert spans[0].end <= spans[1].begin


async def test_groups_that_are_given_up_are_made_up_for():
    async with rollout_pool({"scores": lambda seq: seq % 2}) as (generation, (worker,), _):
        await generation.make(4, formed=asyncio.Event())
        assert [call for call in worker.asked if isinstance(call, Generate)] == [
            Generate(4),
            Generate(2),
            Generate(1),
            Generate(1),
        ]


@pytest.mark.parametrize("dies_in", [Generate, Score])
async def test_the_groups_of_a_worker_that_falls_silent_are_made_by_the_others(monkeypatch, dies_in):
    monkeypatch.setattr(request_reply, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    async with rollout_pool({}, {"mute": [dies_in]}) as (generation, (lasting, dying), _):
        making = asyncio.create_task(generation.make(6, formed=asyncio.Event()))
        await dying.silent.wait()
        await dying.die()
        await asyncio.wait_for(making, 30)
        assert generated(lasting) == 6
        assert len(scored(lasting)) == 6
        await generation.make(2, formed=asyncio.Event())  # the dead one is asked for nothing
        assert generated(lasting) == 8


@pytest.mark.parametrize("dies_in", [Generate, Score])
async def test_a_worker_started_anew_makes_the_groups_of_its_predecessor(dies_in):
    async with rollout_pool({"mute": [dies_in]}) as (generation, (dying,), start):
        making = asyncio.create_task(generation.make(3, formed=asyncio.Event()))
        await dying.silent.wait()
        await dying.die()
        successor = start(0)
        try:
            await asyncio.wait_for(making, 15)  # well before the silence of 20 s would have been noticed
            assert generated(successor) == len(scored(successor)) == 3
        finally:
            await successor.die()


async def test_the_making_up_ends_when_the_batch_is_formed_after_all():
    """The worker died after its groups were stored, before it could say so."""
    async with rollout_pool({}, {"mute": [Score]}) as (generation, (lasting, dying), start):
        formed = asyncio.Event()
        making = asyncio.create_task(generation.make(4, formed=formed))
        await dying.silent.wait()
        await dying.die()
        successor = start(1, mute=[Generate])
        try:
            await successor.silent.wait()
            assert generated(lasting) == 3  # its two, and one of the two that were taken for lost
            formed.set()
            await asyncio.wait_for(making, 15)
        finally:
            await successor.die()


async def test_that_nobody_is_left_is_told(monkeypatch):
    monkeypatch.setattr(request_reply, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    async with rollout_pool({"mute": [Generate]}, timeout=2.0) as (generation, (dying,), _):
        making = asyncio.create_task(generation.make(3, formed=asyncio.Event()))
        await dying.silent.wait()
        await dying.die()
        with pytest.raises(DeadlineExceeded, match="no word from rollout/0, nor within another 2 s"):
            await asyncio.wait_for(making, 30)
