"""`GroupMaker`: turns a sequence number into a group of scored sibling trajectories.

Invariant: a returned group can be trained on, even if the workflow misbehaves (`check_trajectory`).

`rollout.on_failed_sibling` is carried out here, for workflows, reward functions and agents alike. Every exception in a
sibling counts as a failure of infrastructure, except a `DataError`, which another attempt would raise again. Failures
of the policy raise no exception: they are scored.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import numpy as np

from streamrl.config import Config, RolloutConfig
from streamrl.errors import DataError, StreamRLError, WireError, first_error
from streamrl.hooks import load_hook
from streamrl.rollout.activity import Activity
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.data import PromptSource
from streamrl.rollout.generation import GroupRoute
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.workflows import BeforeScoring, Sampler, Session, Workflow
from streamrl.types import LARGEST_REWARD, NO_VERSION, Prompt, Trajectory, TrajectoryGroup
from streamrl.waits import Retry

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
"""Pause before the first retry of a sibling; further pauses are longer (`Retry`)."""


class SiblingResult(NamedTuple):
    """The result of one sibling."""

    trajectories: list[Trajectory]
    reward_parts: dict[str, float]
    """As in `Session`."""


@dataclass
class _GroupTask:
    """The shared state of a group's siblings while it is made."""

    prompt: Prompt
    route: GroupRoute
    before_scoring: BeforeScoring | None
    may_retry: Callable[[], bool]
    left_out: set[int] = field(default_factory=set)
    """Failed siblings that are left out of the group."""
    retries: int = 0


@dataclass(eq=False)
class GroupMaker:
    """Runs the workflow once for each sibling of a prompt, all concurrently; each run is an episode."""

    config: Config
    _: KW_ONLY
    worker: str
    """Name of the process in its groups."""
    prompts: PromptSource
    workflow: Workflow
    chat: ChatTokenizer
    generator: Sampler
    rewards: RewardPool | None
    """None if a reward model scores."""
    activity: Activity

    async def make(
        self,
        seq: int,
        route: GroupRoute,
        before_scoring: BeforeScoring | None = None,
        *,
        row: int | None = None,
        may_retry: Callable[[], bool] = lambda: True,
    ) -> TrajectoryGroup:
        """Return the group of `seq`, generated at the gserver of `route`; `row`: as in `PromptSource.prompt`.

        `before_scoring` is awaited with a sibling's number before each of its scores, and at its end. A failed sibling
        is made again only while `may_retry` returns True. The first failure that rejects the group cancels its other
        siblings and is raised.
        """
        started = time.monotonic()
        group = _GroupTask(self._prompt(seq, row), route, before_scoring, may_retry)
        try:
            async with asyncio.TaskGroup() as tasks:
                siblings = [
                    tasks.create_task(self._sibling(group, sibling), name=f"seq {seq}, sibling {sibling}")
                    for sibling in range(self.config.rollout.group_size)
                ]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        self.activity.groups_shrunk += bool(group.left_out)
        episodes = [episode for task in siblings if (episode := task.result()) is not None]
        return self._assembled(group, episodes, seconds=time.monotonic() - started)

    def _assembled(self, group: _GroupTask, episodes: Sequence[SiblingResult], *, seconds: float) -> TrajectoryGroup:
        """Return the group of these `episodes`; making it took `seconds`."""
        trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
        parts = [episode.reward_parts for episode in episodes]
        return TrajectoryGroup.from_trajectories(
            seq=group.prompt.seq,
            worker=self.worker,
            prompt_length=shared_prefix(trajectories),
            trajectories=trajectories,
            generation_seconds=seconds,
            episodes=[number for number, episode in enumerate(episodes) for _ in episode.trajectories],
            gserver=group.route.name,
            reward_parts=parts if any(parts) else [],
            retries=group.retries,
        )

    def _prompt(self, seq: int, row: int | None) -> Prompt:
        """Return the prompt of `seq`; raises `DataError` if there is none, or it has too many tokens."""
        prompt = self.prompts.prompt(seq, row=row)
        tokens, limit = len(prompt.input_ids), self.config.data.max_prompt_tokens
        if tokens > limit:
            raise DataError(
                f"{self.prompts.place(prompt.index)}: the prompt has {tokens} tokens, more than "
                f"data.max_prompt_tokens = {limit}"
            )
        return prompt

    async def _sibling(self, group: _GroupTask, sibling: int) -> SiblingResult | None:
        """Return one sibling, made again after failures; None if the group is trained on without it.

        Raises the last error if neither is possible.
        """
        where = f"seq {group.prompt.seq}, sibling {sibling}"
        retry = Retry(where, patience=math.inf, first_pause=FIRST_PAUSE_SECONDS, warn_after=math.inf)
        for attempt in itertools.count():
            try:
                return await self._attempt(group, sibling, attempt)
            except DataError:
                raise
            except Exception as error:  # tolerance point: the user's workflow may raise anything
                if self._can_shrink(group):
                    self.activity.failed(group.prompt.seq, error)
                    group.left_out.add(sibling)
                    self.activity.log_reason(f"{where} is left out of its group", error)
                    break
                if not self._can_retry(group, attempt, where=where):
                    raise
                self.activity.failed(group.prompt.seq, error)
                self.activity.log_reason(f"{where} is made again", error)
                group.retries += 1
                with self.activity.retrying():
                    await retry.pause(error)
        if group.before_scoring is not None:
            await group.before_scoring(sibling)  # in a synchronous graph the master waits for all siblings here
        return None

    def _can_shrink(self, group: _GroupTask) -> bool:
        """Return whether one more sibling may be left out."""
        rollout = self.config.rollout
        return rollout.group_size - len(group.left_out) > rollout.fewest_siblings

    def _can_retry(self, group: _GroupTask, attempt: int, *, where: str) -> bool:
        """Return whether a sibling may be made again after `attempt` retries."""
        rollout = self.config.rollout
        if rollout.on_failed_sibling not in ("retry", "zero") or attempt >= rollout.sibling_retries:
            return False
        if not group.may_retry():
            log.info("%s is not made again: tokens of its group are too old by now", where)
            return False
        return True

    async def _attempt(self, group: _GroupTask, sibling: int, attempt: int) -> SiblingResult:
        """Make a sibling once; `attempt` counts from 0."""
        prompt = group.prompt
        session = Session(
            prompt=prompt,
            sibling=sibling,
            generator=self.generator,
            route=group.route,
            rewards=self.rewards,
            reward=self.config.rollout.reward,
            chat=self.chat,
            sampling=self.config.rollout.sampling,
            max_context=self.config.gserver.max_context,
            activity=self.activity,
            before_scoring=group.before_scoring,
            attempt=attempt,
            failures_score_zero=self.config.rollout.on_failed_sibling == "zero",
        )
        try:
            found = await self.workflow.run(prompt, session)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # a TaskGroup would take this for its own cancellation, and the failure would be lost
            raise StreamRLError("the workflow was cancelled by itself: something that it awaited was") from error
        trajectories = found if isinstance(found, list) else [found]
        if not trajectories:
            raise WireError("a workflow that returned no trajectory: the policy was not asked for anything")
        for trajectory in trajectories:
            check_trajectory(trajectory)
        await session.generated()  # a sibling without a score must not keep the others waiting
        return SiblingResult(trajectories, session.reward_parts)


Filter = Callable[[TrajectoryGroup], bool]
"""Whether a group is trained on."""


def load_filter(rollout: RolloutConfig) -> Filter:
    """Return `rollout.filter` with its arguments; raises `ConfigError` if it cannot be loaded."""
    if rollout.filter == "":
        return lambda group: True
    if rollout.filter == "contrast":
        return has_contrast
    chosen: Filter = load_hook(rollout.filter, key="rollout.filter", args=rollout.filter_args)
    return chosen


def has_contrast(group: TrajectoryGroup) -> bool:
    """Whether the responses differ in reward."""
    return bool((group.rewards != group.rewards[0]).any())


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise `WireError` for a trajectory that a trainer could not use; the user's workflow may return one."""
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
    if not -LARGEST_REWARD <= trajectory.reward <= LARGEST_REWARD:  # NaN also fails here
        raise WireError(f"trajectory: the reward is {trajectory.reward}; at most {LARGEST_REWARD:g} in magnitude")
    if trajectory.score is not None and not -LARGEST_REWARD <= trajectory.score <= LARGEST_REWARD:
        raise WireError(f"trajectory: the score is {trajectory.score}; at most {LARGEST_REWARD:g} in magnitude")
    if (trajectory.policy_versions[mask] < 0).any() or (trajectory.policy_versions[~mask] != NO_VERSION).any():
        raise WireError("trajectory: policy_versions must be NO_VERSION exactly where loss_mask is False")


def shared_prefix(trajectories: Sequence[Trajectory]) -> int:
    """Return the length of the common prefix of all siblings, without sampled tokens."""
    first = trajectories[0]
    shared = min(int(np.argmax(trajectory.loss_mask)) for trajectory in trajectories)
    for other in trajectories[1:]:
        differs = first.input_ids[:shared] != other.input_ids[:shared]
        if differs.any():
            shared = int(np.argmax(differs))
    return shared
