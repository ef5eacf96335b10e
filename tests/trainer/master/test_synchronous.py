"""The master's side of generation in a synchronous graph: what becomes of groups whose worker dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest

from streamrl.config import from_dict
from streamrl.ledger import Ledger, Selection
from streamrl.rollout.synchronous import SynchronousRollout
from streamrl.trainer.graph import graph_of
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.trainer.master.synchronous import SynchronousGeneration
from streamrl.transport import request_reply
from streamrl.transport.control import Admission
from streamrl.transport.request_reply import ReplyChannel, RequestChannel
from streamrl.transport.synchronous import (
    GenerateGroups,
    GenerateGroupsReply,
    RolloutCall,
    ScoreGroups,
    ScoreGroupsReply,
)
from tests.credentials import credential_of, keys_of, peer_at
from tests.groups import admitted_ledger, make_meta


class Rollout:
    """A rollout worker over a real socket, which stores what it is to score."""

    def __init__(self, endpoint, index, seqs, buffer):
        self.asked: list[RolloutCall] = []
        self._seqs, self._buffer, self._waiting = seqs, buffer, []
        self._channel = ReplyChannel(
            master=peer_at(endpoint),
            credential=credential_of("rollout", index, to="controller"),
            call_type=GenerateGroups | ScoreGroups,
        )
        self._following = asyncio.create_task(self._follow())

    async def _follow(self):
        while True:
            call_id, call = await self._channel.receive()
            self.asked.append(call)
            if isinstance(call, GenerateGroups):
                self._waiting += [next(self._seqs) for _ in range(call.groups - len(self._waiting))]
                self._channel.reply(call_id, GenerateGroupsReply(list(self._waiting)))
            else:
                self._waiting = [seq for seq in self._waiting if seq not in call.seqs]
                self._buffer.put_batch([make_meta(seq) for seq in call.seqs])
                self._channel.reply(call_id, ScoreGroupsReply(call.seqs))

    async def close(self):
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._channel.close()


class Batches:
    """The master: it trains on a batch as soon as the buffer holds one."""

    def __init__(self, generation, buffer):
        self.generation, self.buffer = generation, buffer
        self.trained: list[list[int]] = []

    async def make(self, groups):
        def all_held(ready):
            enough = len(ready) >= groups
            return Selection(ready.oldest(len(ready)) if enough else [], drop=[], missing=[], short=groups - len(ready))

        forming = asyncio.create_task(self.buffer.take_batch(all_held))
        await asyncio.sleep(0)  # the buffer waits for a batch now
        making = asyncio.create_task(self.generation.make(groups))
        await asyncio.wait({making, forming}, return_when=asyncio.FIRST_COMPLETED)
        if making.done():
            forming.cancel()
            making.result()
        spans = await making
        self.trained.append(sorted(meta.seq for meta in (await forming)[0]))
        self.buffer.trained_on(self.trained[-1])
        return spans


def synchronous(workers):
    return from_dict(
        {
            "trainer": {"graph": "synchronous"},
            "staleness": {"max_staleness": 0},
            "rollout": {"workers": workers, "group_size": SIBLINGS},
        }
    )


SIBLINGS = 2


@contextlib.asynccontextmanager
async def master_of(config, ledger=None):
    ledger = admitted_ledger(batch=config.trainer.batch_groups) if ledger is None else ledger
    buffer = AsyncIOSequenceBuffer(graph_of(config), ledger)
    channel = RequestChannel(keys=keys_of("controller"), notice_type=ScoreGroupsReply, on_notice=lambda *_: None)
    try:
        generation = SynchronousGeneration(graph_of(config), channel=channel, buffer=buffer, config=config)
        yield Batches(generation, buffer), channel.endpoint
    finally:
        await channel.close()


def scored(worker):
    return [seq for call in worker.asked if isinstance(call, ScoreGroups) for seq in call.seqs]


async def test_a_batch_is_dealt_to_all_workers_and_scored_after_all_of_it_is_generated():
    async with master_of(synchronous(workers=2)) as (batches, endpoint):
        seqs = itertools.count()
        workers = [Rollout(endpoint, index, seqs, batches.buffer) for index in range(2)]
        try:
            spans = await batches.make(7)
        finally:
            for worker in workers:
                await worker.close()
    assert [worker.asked[0] for worker in workers] == [GenerateGroups(3), GenerateGroups(4)]
    assert [len(worker.asked) for worker in workers] == [2, 2]
    assert sorted(scored(workers[0]) + scored(workers[1])) == batches.trained[0] == list(range(7))
    assert [span.name for span in spans] == ["actor_gen", "rew_inf"]
    assert spans[0].end <= spans[1].begin


class Station:
    """A rollout worker that dies now and then, in the middle of whatever it does, and starts anew."""

    def __init__(self, config, index, *, endpoint, ledger, buffer, chance):
        self._config, self._index, self._endpoint = config, index, endpoint
        self._ledger, self._table, self._chance = ledger, buffer, chance
        self._name = f"rollout/{index}"
        self._groups: set[asyncio.Task[None]] = set()

    async def live(self):
        while True:
            rollout = SynchronousRollout(
                self._config,
                master=peer_at(self._endpoint),
                credential=credential_of("rollout", self._index, to="controller"),
                admit=self.admit,
                start=self.start,
            )
            running = asyncio.create_task(rollout.run())
            try:
                await asyncio.wait({running}, timeout=self._chance.uniform(0.05, 1.0))
                if running.done():
                    running.result()
            finally:
                for task in (running, *self._groups):
                    task.cancel()
                await asyncio.gather(running, *self._groups, return_exceptions=True)
                await rollout.close()
            await asyncio.sleep(self._chance.uniform(0, 0.2))
            self._ledger.release(self._name)

    async def admit(self, count):
        for _ in range(4000):  # 20 s, as long as the manager lets a worker wait
            if self._ledger.room or not count:
                break
            await asyncio.sleep(0.005)
        await asyncio.sleep(self._chance.choice([0, 0.01]))
        granted = self._chance.randint(1, count) if count else 0
        return [Admission(group.seq, "http://x") for group in self._ledger.admit(self._name, granted, now=0.0)]

    def start(self, admission, gate):
        task = asyncio.create_task(self._make(admission.seq, gate))
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)

    async def _make(self, seq, gate):
        await asyncio.sleep(self._chance.uniform(0, 0.1))
        if self._chance.random() < 0.1:
            self._ledger.reject(seq)
            gate.end(stored=False)
            return
        await asyncio.gather(*(gate.before_scoring(i) for i in range(SIBLINGS)))
        await asyncio.sleep(self._chance.uniform(0, 0.05))
        telling = asyncio.create_task(self._tell(seq))  # the trainer lives on, whatever becomes of this worker
        await asyncio.sleep(self._chance.choice([0, 0.02]))
        await asyncio.shield(telling)
        gate.end(stored=True)

    async def _tell(self, seq):
        await asyncio.sleep(self._chance.choice([0, 0.02]))
        self._table.put_batch([make_meta(seq)])


@pytest.mark.parametrize("seed", range(3))
async def test_batches_form_while_workers_die(monkeypatch, seed):
    """With a ledger that has room for no group more than a batch needs."""
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.05)
    config = synchronous(workers=3)
    ledger = Ledger(groups_per_batch=8, max_staleness=0, lease_seconds=1e6)
    async with master_of(config, ledger) as (batches, endpoint):
        chance = random.Random(seed)
        stations = [
            Station(config, i, endpoint=endpoint, ledger=ledger, buffer=batches.buffer, chance=chance) for i in range(3)
        ]
        living = [asyncio.create_task(station.live()) for station in stations]
        try:
            for version in range(1, 9):
                await asyncio.wait_for(batches.make(8), 15)
                ledger.advance(version)
        finally:
            for task in living:
                task.cancel()
            await asyncio.gather(*living, return_exceptions=True)
    trained = [seq for batch in batches.trained for seq in batch]
    assert [len(batch) for batch in batches.trained] == [8] * 8
    assert sorted([*trained, *ledger.rejected]) == list(range(ledger.next_seq))
