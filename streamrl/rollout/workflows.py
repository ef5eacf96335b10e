"""Everything for writing your own workflow: its interface, its session, and the builder of its trajectory.

A workflow turns a prompt into a trajectory. It is a class with one coroutine:

    class MyWorkflow:
        def __init__(self, *, hint: str) -> None: ...          # rollout.workflow.args

        async def run(self, prompt: Prompt, session: Session) -> Trajectory:
            builder = TrajectoryBuilder()
            builder.append_prompt(prompt.input_ids)
            generation = await session.generate(builder.input_ids)
            builder.append_sampled(generation)
            reward = await session.score(session.response(generation))
            return builder.build(reward=reward, finish_reason=generation.finish_reason)

Set `rollout.workflow.name = "my_module:MyWorkflow"`. One instance serves all groups of a worker, and `run` is called
once for each sibling, concurrently: keep state in local variables. `SingleTurn` and `MultiTurn`, at the end, are
complete examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from streamrl.config import RewardConfig, SamplingConfig, WorkflowConfig
from streamrl.errors import ConfigError, DataError, RewardError
from streamrl.hooks import load_object
from streamrl.rollout.activity import BEFORE_SCORING, GENERATION, Activity
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.generation import GroupRoute, OnTokens, first_known, of_all_tokens
from streamrl.rollout.reward.functions import Response
from streamrl.rollout.reward.pool import RewardPool
from streamrl.stop_strings import before_stop
from streamrl.types import NO_VERSION, Generation, Prompt, Trajectory

OWN_WORKFLOWS = {
    "single_turn": "streamrl.rollout.workflows:SingleTurn",
    "multi_turn": "streamrl.rollout.workflows:MultiTurn",
}
"""The workflows that come with streamrl, by name."""

BeforeScoring = Callable[[int], Awaitable[None]]
"""Awaited with the number of a sibling before it is scored."""


class Workflow(Protocol):
    """Makes one sibling's trajectory."""

    async def run(self, prompt: Prompt, session: Session) -> Trajectory | list[Trajectory]:
        """Return the sibling's trajectory, or a list of them if there are several conversations.

        If the policy fails (no valid answer, no context left), return its trajectory with the reward that it deserves:
        an exception counts as a failure of infrastructure, to which `rollout.on_failed_sibling` applies. A `DataError`,
        which another attempt would raise again, rejects the group.
        """


class Sampler(Protocol):
    """The source of responses: the gservers of a run (`Generator`), or a loop that generates by itself."""

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        rid: str,
        route: GroupRoute,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Return a response; see `Generator.generate`."""


@dataclass(kw_only=True, eq=False)
class Session:
    """Interface of a workflow for one sibling of one group: generate, and score."""

    prompt: Prompt
    sibling: int
    """Number of the sibling in its group, from 0."""
    generator: Sampler
    route: GroupRoute
    rewards: RewardPool | None
    """None if a reward model of the trainer scores."""
    reward: RewardConfig
    chat: ChatTokenizer
    """The tokenizer with its chat template."""
    sampling: SamplingConfig
    """The run's sampling parameters."""
    max_context: int
    """Most tokens of prompt and responses together on the gservers."""
    activity: Activity
    """The counters and the log of the worker's work."""
    before_scoring: BeforeScoring | None = None
    """Awaited before each score."""
    attempt: int = 0
    """Number of failed attempts to make the sibling before this one. Each attempt samples with its own seeds."""
    failures_score_zero: bool = False
    """Whether a failure of the reward function or the agent scores 0."""

    def __post_init__(self) -> None:
        self.reward_parts: dict[str, float] = {}
        """The parts of the last score by name; empty if it had one part."""
        self._requests = 0

    @property
    def episode(self) -> str:
        """Name of this attempt of the sibling, unique in the run: `SEQ.SIBLING`, or `SEQ.SIBLING+ATTEMPT`."""
        return f"{self.prompt.seq}.{self.sibling}" + (f"+{self.attempt}" if self.attempt else "")

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Sample up to `max_new_tokens` tokens after `input_ids` (None: `sampling.max_new_tokens`).

        `max_context` may leave room for fewer. `stop` and `stop_token_ids` are added to the run's; `on_tokens` receives
        tokens as they arrive. Raises `DataError` if there is no room at all, and the errors of `Generator.generate`.
        """
        room = self.max_context - len(input_ids)
        if room < 1:
            raise DataError(
                f"seq {self.prompt.seq}: a conversation of {len(input_ids)} tokens leaves no room in "
                f"gserver.max_context = {self.max_context}"
            )
        rid = f"{self.episode}.{self._requests}"
        self._requests += 1
        with self.activity.in_stage(GENERATION), self.route.request(len(input_ids)):
            generation = await self.generator.generate(
                input_ids,
                max_new_tokens=min(room, max_new_tokens or self.sampling.max_new_tokens),
                rid=rid,
                route=self.route,
                stop=stop,
                stop_token_ids=stop_token_ids,
                on_tokens=on_tokens,
            )
        self.activity.generated(tokens=len(generation.output_ids), interruptions=generation.interruptions)
        return generation

    def response(self, generation: Generation, *, turn: int = 1) -> Response:
        """Return the view of `generation` for the reward function; `turn` counts the policy's turns from 1."""
        text, matched = self.chat.decode(generation.output_ids), generation.matched
        return Response(
            text=before_stop(text, matched) if isinstance(matched, str) else text,
            finish_reason=generation.finish_reason,
            output_tokens=len(generation.output_ids),
            turn=turn,
        )

    async def generated(self) -> None:
        """Wait until the sibling may be scored, after all of its generation; `score` also does this."""
        if self.before_scoring is not None:
            with self.activity.in_stage(BEFORE_SCORING):
                await self.before_scoring(self.sibling)

    async def score(self, response: Response) -> float:
        """Return the reward function's score, less the penalty for a response of this length.

        Returns 0 if a reward model of the trainer will score. Raises `RewardError` if the reward function fails, unless
        `rollout.on_failed_sibling = "zero"` counts that as 0.
        """
        await self.generated()
        if self.rewards is None:
            return 0.0
        with self.activity.scoring():
            try:
                judged = await self.rewards.score(response, self.prompt)
            except RewardError as error:
                self.activity.unscored(self.prompt.seq, error)
                if not self.failures_score_zero:
                    raise
                self.activity.log_reason("a response scores 0", error)
                return 0.0
        overlong = overlong_share(
            response.output_tokens, most=self.sampling.max_new_tokens, buffer=self.reward.overlong_tokens
        )
        penalty = self.reward.overlong_penalty * overlong
        if self.reward.overlong_tokens:
            self.reward_parts = {"function": judged, "overlong": -penalty}
        return judged - penalty


def overlong_share(output_tokens: int, *, most: int, buffer: int) -> float:
    """Return the share, from 0 to 1, of the last `buffer` of `most` tokens that a response of `output_tokens` uses.

    The soft overlong punishment of DAPO (https://arxiv.org/abs/2503.14476, eq. 13) is this share, negated: a response
    that was cut should earn less than one that ended, and the penalty should rise gradually, without a jump. With
    `buffer` 0 there is no penalty.
    """
    if buffer == 0:
        return 0.0
    return min(1.0, max(0.0, (output_tokens - (most - buffer)) / buffer))


class TrajectoryBuilder:
    """Builds a trajectory from tokens; sampled tokens are never tokenized again.

    Invariant: a token is under the loss exactly if `append_sampled` appended it, and then with its own log-probability
    and version.
    """

    def __init__(self) -> None:
        self.input_ids: list[int] = []
        """All tokens so far, which the next generation continues."""
        self.turns = 0
        """Number of appended generations."""
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._routed_experts: NDArray[np.uint8] | None = None

    def append_prompt(self, input_ids: Sequence[int]) -> None:
        """Append tokens that the policy receives as input."""
        self.input_ids.extend(input_ids)
        self._loss_mask.extend([False] * len(input_ids))
        self._logprobs.extend([0.0] * len(input_ids))
        self._versions.extend([NO_VERSION] * len(input_ids))

    def append_sampled(self, generation: Generation) -> None:
        """Append tokens that the policy sampled."""
        self.input_ids.extend(generation.output_ids)
        self._loss_mask.extend([True] * len(generation.output_ids))
        self._logprobs.extend(generation.logprobs)
        self._versions.extend(generation.versions)
        self._routed_experts = first_known(self._routed_experts, generation.routed_experts)
        self.turns += 1

    def append_feedback(self, input_ids: Sequence[int]) -> None:
        """Append tokens of the environment between two turns: context, outside the loss."""
        self.append_prompt(input_ids)

    def build(self, *, reward: float, finish_reason: str) -> Trajectory:
        """Return the trajectory of all tokens so far; `finish_reason` is `stop`, `length`, or a word of your own."""
        return Trajectory(
            input_ids=np.array(self.input_ids, dtype=np.int32),
            loss_mask=np.array(self._loss_mask, dtype=np.bool_),
            behavior_logprobs=np.array(self._logprobs, dtype=np.float32),
            policy_versions=np.array(self._versions, dtype=np.int32),
            reward=reward,
            finish_reason=finish_reason,
            turns=self.turns,
            routed_experts=of_all_tokens(self._routed_experts, len(self.input_ids)),
        )


def load_workflow(config: WorkflowConfig) -> Workflow:
    """Return an instance of the workflow in `config`; raises `ConfigError` if it cannot be created."""
    key = f"rollout.workflow.name = {config.name!r}"
    spec = OWN_WORKFLOWS.get(config.name, config.name)
    if ":" not in spec:
        raise ConfigError(f"{key}: there is none; known: {', '.join(OWN_WORKFLOWS)}, or module:Class")
    kind: object = load_object(spec, key="rollout.workflow.name")
    if not inspect.isclass(kind) or not inspect.iscoroutinefunction(getattr(kind, "run", None)):
        raise ConfigError(f"{key}: must be a class with a coroutine run(prompt, session)")
    try:
        inspect.signature(kind).bind(**config.args)
    except TypeError as error:
        raise ConfigError(f"{key} cannot be made with rollout.workflow.args = {config.args}: {error}") from error
    return cast(Workflow, kind(**config.args))


# --- the workflows that come with streamrl ---


class SingleTurn:
    """The workflow `single_turn`."""

    async def run(self, prompt: Prompt, session: Session) -> Trajectory:
        builder = TrajectoryBuilder()
        builder.append_prompt(prompt.input_ids)
        generation = await session.generate(builder.input_ids)
        builder.append_sampled(generation)
        reward = await session.score(session.response(generation))
        return builder.build(reward=reward, finish_reason=generation.finish_reason)


class MultiTurn:
    """The workflow `multi_turn`: the reward is that of the last attempt, times `discount` for each earlier attempt.

    Another attempt follows while the reward is below `success`, the model ended its answer by itself, and turns and
    context are left.
    """

    def __init__(
        self,
        *,
        max_turns: int = 2,
        feedback: str = "That is not correct. Try again.",
        success: float = 1.0,
        discount: float = 1.0,
    ) -> None:
        """`success`: the reward that ends the attempts. Raises `ConfigError` for values out of range."""
        if max_turns < 1 or not 0 < discount <= 1:
            raise ConfigError(
                f"rollout.workflow.args: max_turns = {max_turns} must be at least 1, "
                f"discount = {discount} above 0 and at most 1"
            )
        self._max_turns = max_turns
        self._feedback = feedback
        self._success = success
        self._discount = discount

    async def run(self, prompt: Prompt, session: Session) -> Trajectory:
        builder = TrajectoryBuilder()
        builder.append_prompt(prompt.input_ids)
        while True:
            generation = await session.generate(builder.input_ids)
            builder.append_sampled(generation)
            reward = await session.score(session.response(generation, turn=builder.turns))
            if reward >= self._success or generation.finish_reason != "stop" or builder.turns == self._max_turns:
                break
            feedback = session.chat.next_turn(generation.output_ids, [{"role": "user", "content": self._feedback}])
            if len(builder.input_ids) + len(feedback) >= session.max_context:
                break
            builder.append_feedback(feedback)
        return builder.build(
            reward=reward * self._discount ** (builder.turns - 1), finish_reason=generation.finish_reason
        )
