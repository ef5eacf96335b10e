"""A rollout worker in a synchronous graph: it generates and scores when the master says so.

Each group runs as it does otherwise, up to the first time that one of its responses is to be
scored. There it waits, until the master has all of the batch generated and asks for scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from streamrl.config import Config
from streamrl.transport.control.groups import Admission
from streamrl.transport.directing import FIRST_ROLLOUT_WORKER, Direction, Generate, Generated, Score, Scored
from streamrl.transport.request_reply import ReplyChannel


class GroupGate:
    """Between a group's generation and its scoring."""

    def __init__(self, siblings: int) -> None:
        self._waiting: set[int] = set()
        self._siblings = siblings
        self._open = asyncio.Event()
        self._generated = asyncio.Event()
        self._ended = asyncio.Event()
        self._stored = False

    async def before_scoring(self, sibling: int) -> None:
        """`sibling` wants a score; waits until it may."""
        self._waiting.add(sibling)
        if len(self._waiting) == self._siblings:
            self._generated.set()
        await self._open.wait()

    def open(self) -> None:
        """Let it be scored."""
        self._open.set()

    def end(self, *, stored: bool) -> None:
        """The group is stored with the trainer, or it was given up."""
        self._stored = stored
        self._generated.set()
        self._ended.set()

    async def generated(self) -> bool:
        """Until all siblings wait to be scored, or the group has ended; answers whether it goes on."""
        await self._generated.wait()
        return self._stored or not self._ended.is_set()

    async def ended(self) -> bool:
        """Until the group has ended; answers whether it is stored."""
        await self._ended.wait()
        return self._stored


class Starts(Protocol):
    """What starts admitted groups."""

    async def admit(self, count: int) -> list[Admission] | None:
        """Sequence numbers that may start; None when the run is over."""
        ...

    def start(self, admission: Admission, gate: GroupGate) -> None:
        """Make the group, in a task of its own."""
        ...


class Director:
    """Follows the master.

    Invariant: an admission that was asked for is waited for, whatever the master says meanwhile, so no group is
    admitted and not known here.
    """

    def __init__(self, config: Config, *, index: int, master: str, starts: Starts) -> None:
        """`master`: ZMQ endpoint of its channel."""
        self._siblings = config.rollout.group_size
        self._starts = starts
        self._gates: dict[int, GroupGate] = {}
        """Of groups that were started and are not scored yet."""
        self._wanted = 0
        """Groups that the master wants to wait here to be scored."""
        self._refusals = 0
        """Admissions that were answered with nothing."""
        self._changed = asyncio.Condition()
        """Of the three above."""
        self._channel: ReplyChannel[Direction] = ReplyChannel(
            endpoint=master, worker=FIRST_ROLLOUT_WORKER + index, call_type=Direction
        )

    async def follow(self) -> None:
        """Carry out directions until the run is over."""
        await self._starts.admit(0)  # what the manager learns with it, such as the size of the data set, is awaited
        async with asyncio.TaskGroup() as tasks:
            carrying_out = tasks.create_task(self._carry_out())
            await self._start_as_wanted()
            carrying_out.cancel()

    async def close(self) -> None:
        await self._channel.close()

    async def _start_as_wanted(self) -> None:
        """Until the run is over."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._gates) < self._wanted)
                lacking = self._wanted - len(self._gates)
            admissions = await self._starts.admit(lacking)
            if admissions is None:
                return
            for admission in admissions:
                gate = GroupGate(self._siblings)
                self._gates[admission.seq] = gate
                self._starts.start(admission, gate)
            self._refusals += not admissions
            await self._tell_change()

    async def _carry_out(self) -> None:
        generating: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                call_id, call = await self._channel.receive()
                if generating is not None:
                    generating.cancel()  # it has replied, or the master goes on without; the groups stay
                match call:
                    case Generate():
                        self._wanted = call.groups
                        generating = tasks.create_task(self._generate(call_id, call.groups))
                    case Score():
                        self._wanted = 0
                        tasks.create_task(self._score(call_id, call.seqs))
                await self._tell_change()

    async def _generate(self, call_id: int, groups: int) -> None:
        """Reply when `groups` wait to be scored, or all that are admitted for now."""
        refusals = self._refusals
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._gates) >= groups or self._refusals > refusals)
            begun = sorted(self._gates)
            alive = await _which(begun, lambda seq: self._gates[seq].generated())
            for seq in set(begun) - set(alive):
                self._gates.pop(seq, None)
            if begun == alive == sorted(self._gates):
                await self._channel.reply(call_id, Generated(alive))
                return
            await self._tell_change()  # others may start instead of those that were given up

    async def _score(self, call_id: int, seqs: list[int]) -> None:
        """Of groups that are unknown here, because a predecessor of this process had them, none is scored."""
        known = [seq for seq in seqs if seq in self._gates]
        for seq in known:
            self._gates[seq].open()
        stored = await _which(known, lambda seq: self._gates[seq].ended())
        for seq in known:
            self._gates.pop(seq, None)
        await self._channel.reply(call_id, Scored(stored))

    async def _tell_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _which(seqs: list[int], question: Callable[[int], Awaitable[bool]]) -> list[int]:
    answers = await asyncio.gather(*(question(seq) for seq in seqs))
    return [seq for seq, answer in zip(seqs, answers, strict=True) if answer]
