"""A rollout worker in a synchronous graph: groups wait to be scored, and the master's calls are carried out."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from streamrl.config import from_dict
from streamrl.rollout.synchronous import SynchronousRollout
from streamrl.transport.control import Admission
from streamrl.transport.request_reply import FIRST_ROLLOUT_WORKER, RequestChannel
from streamrl.transport.synchronous import GenerateGroups, GenerateGroupsReply, ScoreGroups, ScoreGroupsReply
from tests.credentials import credential_of, keys_of, peer_at

SIBLINGS = 2
ME = FIRST_ROLLOUT_WORKER + 3


class Worker:
    """Starts groups that nobody scores; those in `fails` are given up before they are scored, those in `lost` while."""

    def __init__(self, *, fails=(), lost=()):
        self.fails, self.lost = set(fails), set(lost)
        self.scored: list[int] = []
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def admit(self, count):
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
async def synchronous(worker):
    channel = RequestChannel(keys=keys_of("controller"), notice_type=ScoreGroupsReply, on_notice=lambda *_: None)
    config = from_dict({"rollout": {"group_size": SIBLINGS}})
    rollout = SynchronousRollout(
        config,
        master=peer_at(channel.endpoint),
        credential=credential_of("rollout", 3, to="controller"),
        admit=worker.admit,
        start=worker.start,
    )
    running = asyncio.create_task(rollout.run())
    try:
        await channel.wait_for({ME}, patience=10)
        yield channel, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await rollout.close()
        await channel.close()


async def test_nothing_is_scored_before_the_master_says_so():
    worker = Worker()
    async with synchronous(worker) as (channel, _):
        generated = await channel.call(ME, GenerateGroups(5), GenerateGroupsReply, timeout=10)
        assert generated.seqs == [0, 1, 2, 3, 4]
        assert worker.scored == []
        scored = await channel.call(ME, ScoreGroups(generated.seqs[:3]), ScoreGroupsReply, timeout=10)
        assert scored.seqs == sorted(worker.scored) == [0, 1, 2]
        # those that wait already count towards what the master wants next
        assert (await channel.call(ME, GenerateGroups(3), GenerateGroupsReply, timeout=10)).seqs == [3, 4, 5]


async def test_others_are_generated_instead_of_groups_that_fail():
    worker = Worker(fails=[1, 4], lost=[2])
    async with synchronous(worker) as (channel, _):
        generated = await channel.call(ME, GenerateGroups(4), GenerateGroupsReply, timeout=10)
        assert generated.seqs == [0, 2, 3, 5]
        assert (await channel.call(ME, ScoreGroups([0, 2, 3]), ScoreGroupsReply, timeout=10)).seqs == [0, 3]
        assert (await channel.call(ME, GenerateGroups(1), GenerateGroupsReply, timeout=10)).seqs == [5]


async def test_as_many_as_are_admitted_for_now():
    worker = Worker()
    most = asyncio.Queue()
    admit = worker.admit

    async def scarce(count):
        return await admit(min(count, await most.get())) if count else []

    worker.admit = scarce
    async with synchronous(worker) as (channel, _):
        most.put_nowait(2)
        most.put_nowait(0)
        assert (await channel.call(ME, GenerateGroups(5), GenerateGroupsReply, timeout=10)).seqs == [0, 1]
        most.put_nowait(1)
        assert (await channel.call(ME, GenerateGroups(3), GenerateGroupsReply, timeout=10)).seqs == [0, 1, 2]


async def test_an_admission_that_was_asked_for_is_not_lost_when_the_master_goes_on():
    worker = Worker()
    asked, granted = asyncio.Event(), asyncio.Event()
    admit = worker.admit

    async def slow(count):
        if count:
            asked.set()
            await granted.wait()
        return await admit(count)

    worker.admit = slow
    async with synchronous(worker) as (channel, _):
        given_up = asyncio.create_task(channel.call(ME, GenerateGroups(9), GenerateGroupsReply, timeout=30))
        await asked.wait()
        asking = asyncio.create_task(channel.call(ME, GenerateGroups(2), GenerateGroupsReply, timeout=10))
        await asyncio.sleep(0.2)
        granted.set()
        assert (await asking).seqs == [0, 1]
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
