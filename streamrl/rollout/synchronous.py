"""A rollout worker in a synchronous graph: it generates and scores at the master's calls.

Each group runs as in other graphs until each of its siblings reaches its first score, or ends without one. There it
waits until the whole batch is generated and the master calls for scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from streamrl.config import Config
from streamrl.transport.control import Admission, Credential, Peer
from streamrl.transport.request_reply import ReplyChannel
from streamrl.transport.synchronous import (
    GenerateGroups,
    GenerateGroupsReply,
    RolloutCall,
    ScoreGroups,
    ScoreGroupsReply,
)


class ScoringGate:
    """A gate between the generation of one group and its scoring."""

    def __init__(self, siblings: int) -> None:
        self._waiting: set[int] = set()
        self._siblings = siblings
        self._open = asyncio.Event()
        self._generated = asyncio.Event()
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the group is stored, once it has ended."""

    async def before_scoring(self, sibling: int) -> None:
        """Hold `sibling` before its score until the gate is open."""
        self._waiting.add(sibling)
        if len(self._waiting) == self._siblings:
            self._generated.set()
        await self._open.wait()

    def open(self) -> None:
        """Allow the group to be scored."""
        self._open.set()

    def end(self, *, stored: bool) -> None:
        """Note the end of the group; `stored`: it is stored with the trainer, otherwise it was given up."""
        self._ended.set_result(stored)
        self._generated.set()

    async def generated(self) -> bool:
        """Wait until all siblings wait to be scored, or the group has ended; return False if it was given up."""
        await self._generated.wait()
        return not self._ended.done() or self._ended.result()

    async def ended(self) -> bool:
        """Wait until the group has ended; return whether it is stored."""
        return await asyncio.shield(self._ended)


class SynchronousRollout:
    """Carries out the master's calls.

    Owns a gate for each group that was started and is not scored yet. Invariant: a requested admission is always
    awaited, even if the master makes another call in the meantime, so every admitted group is known here.
    """

    def __init__(
        self,
        config: Config,
        *,
        master: Peer,
        credential: Credential,
        admit: Callable[[int], Awaitable[list[Admission] | None]],
        start: Callable[[Admission, ScoringGate], None],
    ) -> None:
        """`master`: the address of its channel; `credential`: identifies this process to it. `admit` takes the number
        of missing groups and returns those that may start, or None when the run is over. `start` makes a group, in its
        own task."""
        self._siblings = config.rollout.group_size
        self._admit = admit
        self._start = start
        self._gates: dict[int, ScoringGate] = {}
        self._target = 0
        """Number of groups that the master wants to have ready for scoring here."""
        self._empty_admissions = 0
        """How often the manager had no group to admit."""
        self._changed = asyncio.Condition()
        """Notified when one of the three above changes."""
        self._channel: ReplyChannel[RolloutCall] = ReplyChannel(
            master=master, credential=credential, call_type=RolloutCall
        )

    async def run(self) -> None:
        """Carry out calls until the run is over."""
        await self._admit(0)  # reports facts such as the size of the data set, which the manager waits for
        async with asyncio.TaskGroup() as tasks:
            calls = tasks.create_task(self._take_calls())
            await self._start_groups()
            calls.cancel()

    async def close(self) -> None:
        """Close the channel to the master."""
        await self._channel.close()

    async def _start_groups(self) -> None:
        """Start the missing groups up to the master's target, until the run is over."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._gates) < self._target)
                missing = self._target - len(self._gates)
            admissions = await self._admit(missing)
            if admissions is None:
                return
            for admission in admissions:
                gate = ScoringGate(self._siblings)
                self._gates[admission.seq] = gate
                self._start(admission, gate)
            self._empty_admissions += not admissions
            await self._notify()

    async def _take_calls(self) -> None:
        generating: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                call_id, call = await self._channel.receive()
                if generating is not None:
                    generating.cancel()  # it has replied, or the master continues without it; the groups stay
                match call:
                    case GenerateGroups():
                        self._target = call.groups
                        generating = tasks.create_task(self._generate(call_id, call.groups))
                    case ScoreGroups():
                        self._target = 0
                        tasks.create_task(self._score(call_id, call.seqs))
                await self._notify()

    async def _generate(self, call_id: int, groups: int) -> None:
        """Reply when `groups` groups wait to be scored, or all that are admitted for now."""
        empty_before = self._empty_admissions
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: len(self._gates) >= groups or self._empty_admissions > empty_before
                )
            begun = sorted(self._gates)
            alive = await _those_for_which(begun, lambda seq: self._gates[seq].generated())
            for seq in set(begun) - set(alive):
                self._gates.pop(seq, None)
            if begun == alive == sorted(self._gates):
                self._channel.reply(call_id, GenerateGroupsReply(alive))
                return
            await self._notify()  # others may start in place of the given-up ones

    async def _score(self, call_id: int, seqs: list[int]) -> None:
        """Score `seqs` and reply with the stored ones; skip unknown groups of this process's predecessor."""
        known = [seq for seq in seqs if seq in self._gates]
        for seq in known:
            self._gates[seq].open()
        stored = await _those_for_which(known, lambda seq: self._gates[seq].ended())
        for seq in known:
            self._gates.pop(seq, None)
        self._channel.reply(call_id, ScoreGroupsReply(stored))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _those_for_which(seqs: list[int], holds: Callable[[int], Awaitable[bool]]) -> list[int]:
    """Return the `seqs` for which `holds` returns True, once it has returned for all."""
    found = await asyncio.gather(*(holds(seq) for seq in seqs))
    return [seq for seq, true in zip(seqs, found, strict=True) if true]
