"""A rollout worker's part in evaluations: it makes the held-out prompts that the controller assigns to it.

They do not count against `rollout.max_concurrent_groups`: the controller limits them over all rollout workers
(`gserver/manager/evaluations.py`). They share workflow, agents and reward processes with training. Invariants: a
failure of one prompt rejects that prompt alone; no held-out group reaches the ledger or the trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from itertools import accumulate

from streamrl.config import Config
from streamrl.config.sections import as_evaluated
from streamrl.errors import PeerError, StreamRLError
from streamrl.rollout.activity import Activity, in_one_line
from streamrl.rollout.data import PromptSource
from streamrl.rollout.groups import GroupMaker
from streamrl.rollout.process import RunConnection, WorkerShutdown, Workshop, facts_of, start_rewards
from streamrl.transport.control import Admission, Admit, AdmitReply, DataFacts, FailRun, HeldOutResult
from streamrl.types import SampleMeta
from streamrl.waits import first_of

log = logging.getLogger(__name__)


class HeldOutPrompts:
    """Makes held-out prompts, several at a time."""

    def __init__(self, config: Config, *, joined: RunConnection, workshops: Mapping[str, Workshop]) -> None:
        self._configs = {name: as_evaluated(workshop.config) for name, workshop in workshops.items()}
        self._joined = joined
        self._membership = joined.membership
        self._control = joined.control
        self._workshops = workshops
        self._activity = Activity(idle="")  # separate from the figures of training
        self._first: dict[str, int] = {}
        """Task → number of its first prompt; the tasks come one after the other."""
        self._prompts: dict[str, PromptSource] = {}
        self._makers: dict[str, GroupMaker] = {}

    async def run(self) -> None:
        """Make held-out prompts until this worker is asked to leave; raises `WorkerShutdown` at the end of the run.

        The data are opened at once, not with the first prompt: an error in [evaluation.data] then ends the run at its
        beginning, and not at an evaluation hours later.
        """
        data = await self._open()
        async with asyncio.TaskGroup() as tasks:
            while (reply := await self._ask(data)) is not None:
                self._membership.note_version(reply.policy_version)
                for admission in reply.admissions:
                    task = self._task(admission.seq)
                    maker = self._makers.get(task) or await self._open_maker(task)
                    tasks.create_task(self._make(maker, admission, task), name=f"held-out prompt {admission.seq}")

    def _task(self, seq: int) -> str:
        """Return the name of the task of held-out prompt `seq`."""
        return next(name for name in reversed(self._first) if self._first[name] <= seq)

    async def _ask(self, data: DataFacts) -> AdmitReply | None:
        """Wait for the controller's reply with the prompts that may begin, perhaps none yet. Return None if this worker
        is asked to leave."""
        member = self._membership
        message = Admit(worker=member.index, count=1, data=data, held_out=True, times_back=member.times_back)
        asking, _ = await first_of(self._control.admit(message), self._membership.leaving.wait())
        if asking.cancelled():
            return None
        reply: AdmitReply = asking.result()
        if reply.stop:
            raise WorkerShutdown
        return reply

    async def _open(self) -> DataFacts:
        """Open the held-out prompts of all tasks, and return their facts; an error while reading them stops the run."""
        try:
            for name, config in self._configs.items():
                position = partial(self._position, name)
                chat = self._workshops[name].chat
                self._prompts[name] = await asyncio.to_thread(PromptSource.open, config, chat, position=position)
            most = {name: config.evaluation.prompts for name, config in self._configs.items()}
            data = await asyncio.to_thread(facts_of, self._prompts, most=most)
        except Exception as error:  # tolerance point: the user's data function may raise anything
            what = f"{self._membership.name}: the data of [evaluation.data]: {type(error).__name__}: {error}"
            await self._control.fail_run(FailRun(worker=self._membership.index, error=what))
            raise
        first = [0, *accumulate(data.of_tasks)]
        self._first = dict(zip(self._prompts, first, strict=False))
        self._activity.describe_row = lambda seq: self._prompts[self._task(seq)].describe(seq)
        return data

    def _position(self, name: str, seq: int) -> int:
        return seq - self._first[name]

    async def _open_maker(self, name: str) -> GroupMaker:
        """Return the group maker of a task. A reasoning-gym reward gets new processes: the others hold training
        data."""
        workshop, config = self._workshops[name], self._configs[name]
        rewards = workshop.rewards
        if rewards is None or config.rollout.reward.function == "reasoning_gym":
            rewards = await start_rewards(config, self._joined.at_exit)
        maker = workshop.group_maker(config, prompts=self._prompts[name], rewards=rewards, activity=self._activity)
        return self._makers.setdefault(name, maker)

    async def _make(self, maker: GroupMaker, admission: Admission, task: str) -> None:
        """Make one prompt, and send its result."""
        seq = admission.seq
        result = partial(HeldOutResult, self._membership.index, admission.evaluation, seq, task=task)
        try:
            group = await maker.make(seq, self._joined.route(admission))
            meta = SampleMeta.of(group, head=0)
            found = result(
                rewards=meta.episode_rewards,
                lengths=meta.response_lengths,
                cut=group.finish_reasons.count("length"),
                oldest_version=min(meta.version_counts),
                newest_version=max(meta.version_counts),
            )
        except Exception as error:  # tolerance point: one prompt may fail, for example in the user's reward function
            if not isinstance(error, StreamRLError):
                log.exception("held-out prompt %d failed", seq)
            self._activity.log_reason(f"held-out prompt {seq} is rejected", error)
            found = result(error=in_one_line(error), row=self._activity.describe_row(seq))
        try:
            await self._control.held_out_result(found)
        except PeerError as error:  # the evaluation was dropped when the run went back to a checkpoint
            if not 400 <= error.status < 500:
                raise
            log.warning("the result of held-out prompt %d was refused: %s", seq, error)
