"""`GroupMaker`: one admission in, one group of scored sibling trajectories out."""

from __future__ import annotations

import asyncio
import time

from streamrl.config import Config
from streamrl.errors import DataError, first_error
from streamrl.rollout.activity import Activity
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.data import PromptSource
from streamrl.rollout.partial import Generator, Route
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.session import BeforeScoring, Session
from streamrl.rollout.workflow import Workflow, check_trajectory, shared_prefix
from streamrl.types import Prompt, Trajectory, TrajectoryGroup


class GroupMaker:
    """Runs the workflow once for each sibling of a prompt, all at the same time."""

    def __init__(
        self,
        config: Config,
        *,
        worker: str,
        prompts: PromptSource,
        workflow: Workflow,
        chat: ChatTokenizer,
        generator: Generator,
        rewards: RewardPool | None,
        activity: Activity,
    ) -> None:
        self._config = config
        self._worker = worker
        self._prompts = prompts
        self._workflow = workflow
        self._chat = chat
        self._generator = generator
        self._rewards = rewards
        self._activity = activity

    async def make(self, seq: int, route: Route, before_scoring: BeforeScoring | None = None) -> TrajectoryGroup:
        """The group of `seq`. The first sibling that fails ends the others, and its error is raised.

        `before_scoring` is awaited, with the sibling's number, before each of its scores.
        """
        started = time.monotonic()
        prompt = self._prompts.prompt(seq)
        limit = self._config.data.max_prompt_tokens
        if len(prompt.input_ids) > limit:
            raise DataError(
                f"the prompt (row {prompt.index}) has {len(prompt.input_ids)} tokens, "
                f"more than data.max_prompt_tokens = {limit}"
            )
        if not prompt.input_ids:
            raise DataError(f"the prompt (row {prompt.index}) has no tokens")
        try:
            async with asyncio.TaskGroup() as tasks:
                siblings = [
                    tasks.create_task(
                        self._sibling(prompt, sibling, route, before_scoring), name=f"seq {seq}, sibling {sibling}"
                    )
                    for sibling in range(self._config.rollout.group_size)
                ]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        trajectories = [task.result() for task in siblings]
        return TrajectoryGroup.from_trajectories(
            seq=seq,
            worker=self._worker,
            prompt_length=shared_prefix(trajectories),
            trajectories=trajectories,
            generation_seconds=time.monotonic() - started,
        )

    async def _sibling(
        self, prompt: Prompt, sibling: int, route: Route, before_scoring: BeforeScoring | None
    ) -> Trajectory:
        session = Session(
            prompt=prompt,
            sibling=sibling,
            generator=self._generator,
            route=route,
            rewards=self._rewards,
            reward=self._config.rollout.reward,
            chat=self._chat,
            sampling=self._config.rollout.sampling,
            max_context=self._config.gserver.max_context,
            activity=self._activity,
            before_scoring=before_scoring,
        )
        trajectory = await self._workflow.run(prompt, session)
        check_trajectory(trajectory)
        return trajectory
