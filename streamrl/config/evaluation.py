"""The section [evaluation] of the configuration: when the policy is tried on held-out prompts, on which, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.config.fields import (
    DataSource,
    Every,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    TopP,
)

if TYPE_CHECKING:
    from streamrl.config import Config

HELD_OUT_SEED_DISTANCE = 2**30


class EvaluationDataConfig(Section, frozen=True):
    """Held-out prompts. What is not set here is as in [data]."""

    source: DataSource | None = None
    path: str | None = None
    args: dict[str, Any] | None = None
    size: Positive | None = None
    prompt_key: str | None = None
    answer_key: str | None = None
    system_prompt: str | None = None
    suffix: str | None = None
    shuffle: bool | None = None
    max_prompt_tokens: Positive | None = None


class EvaluationConfig(Section, frozen=True):
    """Evaluation on held-out prompts while training goes on; off unless it is said when.

    Epochs, steps and seconds each count by themselves; 0: not by this one.
    """

    every_epochs: NonNegative = 0
    every_steps: NonNegative = 0
    every_seconds: NonNegativeFloat = 0.0
    at_start: bool = False
    """Evaluate the policy that the run begins with."""
    at_end: bool = False
    """Evaluate the last policy; the run ends after that."""
    end_timeout_seconds: PositiveFloat = 900.0
    """How long the run waits for the evaluation at its end."""
    data: EvaluationDataConfig = EvaluationDataConfig()
    seed: NonNegative | None = None
    """Of the held-out prompts; None: `run.seed + 2**30`, far from the rows of the training data (a generator may
    make row i from seed + i)."""
    prompts: Positive | None = None
    """How many, the same ones each time; None: all rows."""
    samples: Positive = 1
    """k: responses to each prompt."""
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""
    top_p: TopP = 1.0
    max_new_tokens: Positive | None = None
    """None: as in training."""
    max_concurrent: Positive = 16
    """Prompts at a time, each with all its samples, so that training keeps most of the gservers."""
    pass_reward: float = 1.0
    """A response with at least this reward counts as a pass in pass@k."""

    @property
    def every(self) -> Every:
        """When, besides at start and end."""
        return Every(epochs=self.every_epochs, steps=self.every_steps, seconds=self.every_seconds)

    @property
    def enabled(self) -> bool:
        """Whether there is ever an evaluation."""
        return self.every.ever or self.at_start or self.at_end


def as_evaluated(config: Config) -> Config:
    """The configuration with which rollout code makes the groups of an evaluation.

    Held-out prompts with their own seed, `evaluation.samples` siblings, sampled as the section says, and
    scored by the reward function alone, also where a reward model scores in training.
    """
    chosen = config.evaluation
    settings = {name: value for name, value in msgspec.structs.asdict(chosen.data).items() if value is not None}
    seed = config.run.seed + HELD_OUT_SEED_DISTANCE if chosen.seed is None else chosen.seed
    most = config.rollout.sampling.max_new_tokens if chosen.max_new_tokens is None else chosen.max_new_tokens
    replace = msgspec.structs.replace
    sampling = replace(
        config.rollout.sampling,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=-1,
        min_p=0.0,
        max_new_tokens=most,
    )
    rollout = replace(
        config.rollout,
        group_size=chosen.samples,
        sampling=sampling,
        reward=replace(config.rollout.reward, overlong_tokens=0),
    )
    return replace(
        config,
        run=replace(config.run, seed=seed),
        data=replace(config.data, **settings),
        rollout=rollout,
        reward_model=replace(config.reward_model, path=None),
    )
