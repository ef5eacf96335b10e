"""A rollout worker's part in evaluations: it makes the held-out prompts that the controller assigns to it.

They do not count against `rollout.max_concurrent_groups`: the controller limits them over all rollout workers
(`gserver/manager/evaluations.py`). They share workflow, agents and reward processes with training. Invariants: a
failure of one prompt rejects that prompt alone; no held-out group reaches the ledger or the trainer.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from streamrl.config import Config
from streamrl.config.sections import as_evaluated
from streamrl.errors import PeerError, StreamRLError
from streamrl.rollout.activity import Activity, in_one_line
from streamrl.rollout.data import PromptSource
from streamrl.rollout.generation import GroupRoute
from streamrl.rollout.groups import GroupMaker
from streamrl.rollout.process import RunConnection, WorkerShutdown, Workshop, start_rewards
from streamrl.transport.control import Admission, Admit, AdmitReply, AskRoute, DataFacts, FailRun, HeldOutResult
from streamrl.types import SampleMeta
from streamrl.waits import first_of

log = logging.getLogger(__name__)


class HeldOutPrompts:
    """Makes held-out prompts, several at a time."""

    def __init__(self, config: Config, *, joined: RunConnection, workshop: Workshop) -> None:
        self._config = as_evaluated(config)
        self._joined = joined
        self._membership = joined.membership
        self._control = joined.control
        self._workshop = workshop
        self._activity = Activity(idle="")  # separate from the figures of training

    async def run(self) -> None:
        """Make held-out prompts until this worker is asked to leave; raises `WorkerShutdown` at the end of the run.

        The data are opened at once, not with the first prompt: an error in [evaluation.data] then ends the run at its
        beginning, and not at an evaluation hours later.
        """
        prompts, data = await self._open()
        maker: GroupMaker | None = None
        async with asyncio.TaskGroup() as tasks:
            while (reply := await self._ask(data)) is not None:
                self._membership.note_version(reply.policy_version)
                for admission in reply.admissions:
                    maker = maker or await self._open_maker(prompts)
                    tasks.create_task(self._make(maker, admission), name=f"held-out prompt {admission.seq}")

    async def _ask(self, data: DataFacts) -> AdmitReply | None:
        """Wait for the controller's reply with the prompts that may begin, perhaps none yet. Return None if this worker
        is asked to leave."""
        message = Admit(worker=self._membership.index, count=1, data=data, held_out=True)
        asking, _ = await first_of(self._control.admit(message), self._membership.leaving.wait())
        if asking.cancelled():
            return None
        reply: AdmitReply = asking.result()
        if reply.stop:
            raise WorkerShutdown
        return reply

    async def _open(self) -> tuple[PromptSource, DataFacts]:
        """Return the held-out prompts and their facts; an error while reading the data stops the run."""
        try:
            prompts = await asyncio.to_thread(PromptSource.open, self._config, self._workshop.chat)
            return prompts, DataFacts(len(prompts), await asyncio.to_thread(prompts.digest))
        except Exception as error:  # tolerance point: the user's data function may raise anything
            what = f"{self._membership.name}: the data of [evaluation.data]: {type(error).__name__}: {error}"
            await self._control.fail_run(FailRun(worker=self._membership.index, error=what))
            raise

    async def _open_maker(self, prompts: PromptSource) -> GroupMaker:
        """Return the group maker. A reasoning-gym reward gets new processes: the others hold training data."""
        rewards = self._workshop.rewards
        if rewards is None or self._config.rollout.reward.function == "reasoning_gym":
            rewards = await start_rewards(self._config, self._joined.at_exit)
        self._activity.describe_row = prompts.describe
        return self._workshop.group_maker(self._config, prompts=prompts, rewards=rewards, activity=self._activity)

    async def _make(self, maker: GroupMaker, admission: Admission) -> None:
        """Make one prompt, and send its result."""
        seq = admission.seq
        result = partial(HeldOutResult, self._membership.index, admission.evaluation, seq)
        route = GroupRoute(admission.gserver, name=admission.name, find_another=partial(self._find_another, admission))
        try:
            group = await maker.make(seq, route)
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

    async def _find_another(self, admission: Admission, failed: str) -> str:
        message = AskRoute(self._membership.index, admission.seq, failed, admission.evaluation)
        return (await self._control.route(message)).gserver
