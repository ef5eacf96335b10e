"""`GroupMaker`: a sequence number in, a group of scored sibling trajectories out.

Invariant: a group that leaves here can be trained on, whatever the workflow did (`check_trajectory`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from streamrl.config import Config
from streamrl.errors import DataError, StreamRLError, WireError, first_error
from streamrl.rollout.activity import Activity
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.data import PromptSource
from streamrl.rollout.generation import Generator, GroupRoute
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.workflows import BeforeScoring, Session, Workflow
from streamrl.types import LARGEST_REWARD, NO_VERSION, Prompt, Trajectory, TrajectoryGroup


class GroupMaker:
    """Runs the workflow once for each sibling of a prompt, all at the same time: each is an episode."""

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
        """`worker`: name of the process, as groups carry it. `rewards`: None where a reward model scores."""
        self._config = config
        self._worker = worker
        self._prompts = prompts
        self._workflow = workflow
        self._chat = chat
        self._generator = generator
        self._rewards = rewards
        self._activity = activity

    async def make(self, seq: int, route: GroupRoute, before_scoring: BeforeScoring | None = None) -> TrajectoryGroup:
        """Return the group of `seq`, generated at the gserver that `route` names.

        The first sibling that fails ends the others, and its error is raised. `before_scoring` is awaited, with the
        sibling's number, before each of its scores, and at its end.
        """
        started = time.monotonic()
        prompt = self._prompt(seq)
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
        episodes = [task.result() for task in siblings]
        trajectories = [trajectory for found, _ in episodes for trajectory in found]
        parts = [of_reward for _, of_reward in episodes]
        return TrajectoryGroup.from_trajectories(
            seq=seq,
            worker=self._worker,
            prompt_length=shared_prefix(trajectories),
            trajectories=trajectories,
            generation_seconds=time.monotonic() - started,
            episodes=[episode for episode, (found, _) in enumerate(episodes) for _ in found],
            gserver=route.name,
            reward_parts=parts if any(parts) else [],
        )

    def _prompt(self, seq: int) -> Prompt:
        """Return the prompt of `seq`; raises `DataError` when there is none, or it has too many tokens."""
        prompt = self._prompts.prompt(seq)
        tokens, limit = len(prompt.input_ids), self._config.data.max_prompt_tokens
        if tokens > limit:
            raise DataError(
                f"the prompt (row {prompt.index}) has {tokens} tokens, more than data.max_prompt_tokens = {limit}"
            )
        return prompt

    async def _sibling(
        self, prompt: Prompt, sibling: int, route: GroupRoute, before_scoring: BeforeScoring | None
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """Return the trajectories of one episode, and what its reward is made of."""
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
        try:
            found = await self._workflow.run(prompt, session)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # a group of tasks takes this for the end that it asked for: nobody would hear of the failure
            raise StreamRLError("the workflow was cancelled by itself: something that it awaited was") from error
        trajectories = found if isinstance(found, list) else [found]
        if not trajectories:
            raise WireError("a workflow that returned no trajectory: the policy was not asked for anything")
        for trajectory in trajectories:
            check_trajectory(trajectory)
        await session.generated()  # one that was not scored is as far as the others: nobody is to wait for it
        return trajectories, session.reward_parts


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise `WireError` for a trajectory that a trainer could not use; a workflow of the user's may make one."""
    arrays = (trajectory.loss_mask, trajectory.behavior_logprobs, trajectory.policy_versions)
    tokens = len(trajectory.input_ids)
    mask = trajectory.loss_mask
    if any(array.shape != (tokens,) for array in arrays):
        raise WireError(f"trajectory: {tokens} tokens with arrays of the shapes {[array.shape for array in arrays]}")
    routed = trajectory.routed_experts
    if routed is not None and (routed.ndim != 2 or len(routed) != tokens or routed.dtype != np.uint8):
        raise WireError(f"trajectory: {tokens} tokens with routed_experts of {routed.dtype}{list(routed.shape)}")
    if not mask.any():
        raise WireError("trajectory: the policy sampled none of its tokens")
    if mask[0]:
        raise WireError("trajectory: its first token is sampled; there must be a prompt before it")
    if not -LARGEST_REWARD <= trajectory.reward <= LARGEST_REWARD:  # NaN fails, too
        raise WireError(f"trajectory: the reward is {trajectory.reward}; at most {LARGEST_REWARD:g} in magnitude")
    if trajectory.score is not None and not -LARGEST_REWARD <= trajectory.score <= LARGEST_REWARD:
        raise WireError(f"trajectory: the score is {trajectory.score}; at most {LARGEST_REWARD:g} in magnitude")
    if (trajectory.policy_versions[mask] < 0).any() or (trajectory.policy_versions[~mask] != NO_VERSION).any():
        raise WireError("trajectory: policy_versions must be NO_VERSION exactly where loss_mask is False")


def shared_prefix(trajectories: Sequence[Trajectory]) -> int:
    """Return how many leading tokens all siblings share and none of them sampled."""
    first = trajectories[0]
    shared = min(int(np.argmax(trajectory.loss_mask)) for trajectory in trajectories)
    for other in trajectories[1:]:
        differs = first.input_ids[:shared] != other.input_ids[:shared]
        if differs.any():
            shared = int(np.argmax(differs))
    return shared
