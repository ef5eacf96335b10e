"""How a prompt becomes a trajectory: the `Workflow` protocol, and the builder that keeps the books.

A workflow of your own is a class with one coroutine:

    class MyWorkflow:
        def __init__(self, *, hint: str) -> None: ...          # rollout.workflow.args

        async def run(self, prompt: Prompt, session: Session) -> Trajectory:
            builder = TrajectoryBuilder()
            builder.append_prompt(prompt.input_ids)
            generation = await session.generate(builder.input_ids)
            builder.append_sampled(generation)
            reward = await session.score(session.response(generation))
            return builder.build(reward=reward, finish_reason=generation.finish_reason)

Set `rollout.workflow.name = "my_module:MyWorkflow"`. One instance serves all groups of a worker,
`run` is called once for each sibling, concurrently: keep state in local variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from streamrl.errors import WireError
from streamrl.rollout.partial import Generation
from streamrl.types import LARGEST_REWARD, NO_VERSION, Prompt, Trajectory

if TYPE_CHECKING:
    from streamrl.rollout.session import Session


class Workflow(Protocol):
    """Makes one sibling's trajectory."""

    async def run(self, prompt: Prompt, session: Session) -> Trajectory:
        """Errors that it raises reject the group."""


class TrajectoryBuilder:
    """Appends tokens in, tokens out; what was sampled is never tokenized again.

    Invariant: a token is under the loss exactly if `append_sampled` brought it, and then with
    its own log-probability and version.
    """

    def __init__(self) -> None:
        self.input_ids: list[int] = []
        """All tokens so far: what the next generation continues."""
        self.turns = 0
        """How many generations were appended."""
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    def append_prompt(self, input_ids: Sequence[int]) -> None:
        """Tokens that the policy is given."""
        self.input_ids.extend(input_ids)
        self._loss_mask.extend([False] * len(input_ids))
        self._logprobs.extend([0.0] * len(input_ids))
        self._versions.extend([NO_VERSION] * len(input_ids))

    def append_sampled(self, generation: Generation) -> None:
        """Tokens that the policy sampled."""
        self.input_ids.extend(generation.output_ids)
        self._loss_mask.extend([True] * len(generation.output_ids))
        self._logprobs.extend(generation.logprobs)
        self._versions.extend(generation.versions)
        self.turns += 1

    def append_feedback(self, input_ids: Sequence[int]) -> None:
        """Tokens of the environment between two turns: context, outside the loss."""
        self.append_prompt(input_ids)

    def build(self, *, reward: float, finish_reason: str) -> Trajectory:
        """The trajectory of all tokens so far."""
        return Trajectory(
            input_ids=np.array(self.input_ids, dtype=np.int32),
            loss_mask=np.array(self._loss_mask, dtype=np.bool_),
            behavior_logprobs=np.array(self._logprobs, dtype=np.float32),
            policy_versions=np.array(self._versions, dtype=np.int32),
            reward=reward,
            finish_reason=finish_reason,
            turns=self.turns,
        )


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise `WireError` for a trajectory that a trainer could not use; a workflow of the user's may make one."""
    arrays = (trajectory.loss_mask, trajectory.behavior_logprobs, trajectory.policy_versions)
    tokens = len(trajectory.input_ids)
    mask = trajectory.loss_mask
    if any(array.shape != (tokens,) for array in arrays):
        raise WireError(f"trajectory: {tokens} tokens with arrays of the shapes {[array.shape for array in arrays]}")
    if not mask.any():
        raise WireError("trajectory: the policy sampled none of its tokens")
    if mask[0]:
        raise WireError("trajectory: its first token is sampled; there must be a prompt before it")
    if not -LARGEST_REWARD <= trajectory.reward <= LARGEST_REWARD:  # NaN fails, too
        raise WireError(f"trajectory: the reward is {trajectory.reward}; at most {LARGEST_REWARD:g} in magnitude")
    if (trajectory.policy_versions[mask] < 0).any() or (trajectory.policy_versions[~mask] != NO_VERSION).any():
        raise WireError("trajectory: policy_versions must be NO_VERSION exactly where loss_mask is False")


def shared_prefix(trajectories: Sequence[Trajectory]) -> int:
    """Leading tokens that all siblings share and that none of them sampled."""
    first = trajectories[0]
    shared = min(int(np.argmax(trajectory.loss_mask)) for trajectory in trajectories)
    for other in trajectories[1:]:
        differs = first.input_ids[:shared] != other.input_ids[:shared]
        if differs.any():
            shared = int(np.argmax(differs))
    return shared
