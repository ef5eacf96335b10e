"""A directed rollout worker: groups wait before they are scored, and the master's word is followed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from streamrl.config import from_dict
from streamrl.rollout.directed import Director, GroupGate
from streamrl.transport.control.groups import Admission
from streamrl.transport.directing import FIRST_ROLLOUT_WORKER, Generate, Generated, Score, Scored, name_on_channel
from streamrl.transport.request_reply import RequestChannel

SIBLINGS = 2
ME = FIRST_ROLLOUT_WORKER + 3


class Worker:
    """Starts groups that are scored by nobody; `fails` are given up before their score, `lost` at it."""

    def __init__(self, *, fails=(), lost=(), over_after=1_000):
        self.fails, self.lost = set(fails), set(lost)
        self.scored: list[int] = []
        self._next = 0
        self._over_after = over_after
        self._tasks: set[asyncio.Task[None]] = set()

    async def admit(self, count):
        if self._next >= self._over_after:
            return None
        # never more than two at once, as a ledger with little room would do it
        seqs = range(self._next, self._next + min(count, 2))
        self._next = seqs.stop
        return [Admission(seq=seq, gserver="http://x") for seq in seqs]

    def start(self, admission, gate):
        task = asyncio.create_task(self._make(admission.seq, gate))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make(self, seq, gate):
        if seq not in self.fails:
            await asyncio.gather(*(gate.before_scoring(i) for i in range(SIBLINGS)))
            self.scored.append(seq)
        gate.end(stored=seq not in self.fails | self.lost)


@contextlib.asynccontextmanager
async def directed(worker):
    channel = RequestChannel(host="127.0.0.1", notice_type=Scored, on_notice=lambda *_: None, name_of=name_on_channel)
    config = from_dict({"rollout": {"group_size": SIBLINGS}})
    director = Director(config, index=3, master=channel.endpoint, starts=worker)
    following = asyncio.create_task(director.follow())
    try:
        await channel.wait_for({ME}, patience=10)
        yield channel, following
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await director.close()
        await channel.close()


async def test_nothing_is_scored_before_the_master_says_so():
    worker = Worker()
    async with directed(worker) as (channel, _):
        generated = await channel.call(ME, Generate(5), Generated, timeout=10)
        assert generated.seqs == [0, 1, 2, 3, 4]
        assert worker.scored == []
        scored = await channel.call(ME, Score(generated.seqs[:3]), Scored, timeout=10)
        assert scored.seqs == sorted(worker.scored) == [0, 1, 2]
        # those that wait still count towards the next batch
        assert (await channel.call(ME, Generate(3), Generated, timeout=10)).seqs == [3, 4, 5]


async def test_groups_that_fail_are_told_by_their_absence():
    worker = Worker(fails=[1], lost=[2])
    async with directed(worker) as (channel, _):
        generated = await channel.call(ME, Generate(4), Generated, timeout=10)
        assert generated.seqs == [0, 2, 3]
        assert (await channel.call(ME, Score([0, 2, 3]), Scored, timeout=10)).seqs == [0, 3]


async def test_a_generation_that_was_given_up_is_taken_over():
    worker = Worker()
    stuck = asyncio.Event()
    admit = worker.admit

    async def hesitant(count):
        if count == 9:
            stuck.set()
            await asyncio.Event().wait()
        return await admit(count)

    worker.admit = hesitant
    async with directed(worker) as (channel, _):
        given_up = asyncio.create_task(channel.call(ME, Generate(9), Generated, timeout=30))
        await stuck.wait()
        assert (await channel.call(ME, Generate(2), Generated, timeout=10)).seqs == [0, 1]
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up


async def test_it_ends_when_the_run_is_over():
    async with directed(Worker(over_after=2)) as (channel, following):
        assert (await channel.call(ME, Generate(2), Generated, timeout=10)).seqs == [0, 1]
        asking = asyncio.create_task(channel.call(ME, Generate(4), Generated, timeout=30))
        await asyncio.wait_for(following, 10)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_gate_of_a_group_that_needs_no_score_opens_when_it_ends():
    gate = GroupGate(SIBLINGS)
    waiting = asyncio.create_task(gate.generated())
    gate.end(stored=True)
    assert await waiting
    assert await gate.ended()
