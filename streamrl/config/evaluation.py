"""The configuration under which an evaluation makes its groups."""

from __future__ import annotations

import msgspec

from streamrl.config.sections import Config

HELD_OUT_SEED_DISTANCE = 2**30


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
