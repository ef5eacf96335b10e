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
    """Follows the master."""

    def __init__(self, config: Config, *, index: int, master: str, starts: Starts) -> None:
        """`master`: ZMQ endpoint of its channel."""
        self._siblings = config.rollout.group_size
        self._starts = starts
        self._gates: dict[int, GroupGate] = {}
        """Of groups that were started and are not scored yet."""
        self._channel: ReplyChannel[Direction] = ReplyChannel(
            endpoint=master, worker=FIRST_ROLLOUT_WORKER + index, call_type=Direction
        )

    async def follow(self) -> None:
        """Carry out directions until the run is over."""
        over = asyncio.Event()
        await self._starts.admit(0)  # what the manager learns with it, such as the size of the data set, is awaited
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(tasks, over))
            await over.wait()
            reading.cancel()

    async def close(self) -> None:
        await self._channel.close()

    async def _read(self, tasks: asyncio.TaskGroup, over: asyncio.Event) -> None:
        generating: asyncio.Task[None] | None = None
        while True:
            call_id, call = await self._channel.receive()
            match call:
                case Generate():
                    if generating is not None:
                        generating.cancel()  # the master gave it up; its groups are taken over
                    generating = tasks.create_task(self._generate(call_id, call.groups, over))
                case Score():
                    tasks.create_task(self._score(call_id, call.seqs))

    async def _generate(self, call_id: int, groups: int, over: asyncio.Event) -> None:
        while len(self._gates) < groups:
            admissions = await self._starts.admit(groups - len(self._gates))
            if admissions is None:
                over.set()
                return
            for admission in admissions:
                gate = GroupGate(self._siblings)
                self._gates[admission.seq] = gate
                self._starts.start(admission, gate)
        begun = sorted(self._gates)
        alive = await _which(begun, lambda seq: self._gates[seq].generated())
        for seq in set(begun) - set(alive):
            del self._gates[seq]
        await self._channel.reply(call_id, Generated(alive))

    async def _score(self, call_id: int, seqs: list[int]) -> None:
        for seq in seqs:
            self._gates[seq].open()
        stored = await _which(seqs, lambda seq: self._gates[seq].ended())
        for seq in seqs:
            del self._gates[seq]
        await self._channel.reply(call_id, Scored(stored))


async def _which(seqs: list[int], question: Callable[[int], Awaitable[bool]]) -> list[int]:
    answers = await asyncio.gather(*(question(seq) for seq in seqs))
    return [seq for seq, answer in zip(seqs, answers, strict=True) if answer]
