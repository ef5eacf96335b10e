"""Batches of the benchmarks that train, and the type of the contenders of `bench_trainer.py`.

A batch is drawn from a seed, so that every contender trains on the same tokens. The learning rate is so small that a
step does all of its work and leaves the weights, within float32, unchanged: after any number of rounds all contenders
still have the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig

from streamrl.types import NO_VERSION, TrajectoryGroup

SIBLINGS, PROMPT = 8, 64
MEAN, SIGMA, LONGEST = 64, 0.8, 256
"""The log-normal response lengths, in tokens."""
EPISODES, TURNS, BRANCHES = 4, 8, 2
"""An agents' group; half-way through its turns an episode splits into several branches."""
TURN_TOKENS = 32
"""Length of the response in each turn, and of the feedback after it."""
MICRO_TOKENS = 4096
"""Size of a micro-batch; padding counts."""
LR, BETAS, GRAD_CLIP = 1e-9, (0.9, 0.95), 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ADVANTAGE_EPS = 1e-4
"""Added to the deviation of a group's rewards."""


class Found(NamedTuple):
    """Loss and gradient norm of an optimizer step."""

    loss: float
    grad_norm: float
    """Before clipping."""


Step = Callable[[list[TrajectoryGroup]], Found]
"""One optimizer step: forward, backward, clipping, AdamW."""


class Contender(NamedTuple):
    """A way to train on groups."""

    step: Step
    computed: Callable[[list[TrajectoryGroup]], int]
    """Tokens that go through the model in a step, padding included."""


def trainable_tokens(folder: Path) -> NDArray[np.int64]:
    """All token ids of the checkpoint except the one of padding.

    transformers keeps the embedding of the padding token from having a gradient, Megatron Core does not.
    """
    config = AutoConfig.from_pretrained(folder)
    kept = [token for token in range(config.vocab_size) if token != config.pad_token_id]
    return np.array(kept, dtype=np.int64)


def make_groups(vocabulary: NDArray[np.int64], *, count: int, seed: int) -> list[TrajectoryGroup]:
    """Random prompts, each with responses of ragged lengths."""
    random = np.random.default_rng(seed)
    groups = []
    for seq in range(count):
        prompt = random.choice(vocabulary, PROMPT)
        drawn = random.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, SIBLINGS)
        lengths = np.clip(drawn.round(), 1, LONGEST).astype(int)
        sequences = [MaskedTokens.of_prompt(prompt).more(random.choice(vocabulary, n), sampled=True) for n in lengths]
        rewards = random.random(len(sequences), dtype=np.float32)
        groups.append(packed(seq, sequences, rewards, behavior_logprob=uniform(vocabulary)))
    return groups


def make_agents_groups(vocabulary: NDArray[np.int64], *, count: int, seed: int) -> list[TrajectoryGroup]:
    """Random prompts, each with the conversations of `EPISODES`, as a rollout worker makes them: each call's tokens are
    under the loss in the first conversation that has them, and context in the others. An episode has one reward."""
    random = np.random.default_rng(seed)
    groups = []
    for seq in range(count):
        prompt = random.choice(vocabulary, PROMPT)
        sequences: list[MaskedTokens] = []
        for _ in range(EPISODES):
            conversations = [MaskedTokens.of_prompt(prompt)]
            for turn in range(TURNS):
                if turn == TURNS // 2:
                    (first,) = conversations
                    conversations += [first.as_context()] * (BRANCHES - 1)
                last = turn == TURNS - 1
                for branch, conversation in enumerate(conversations):
                    response, feedback = random.choice(vocabulary, (2, TURN_TOKENS))
                    longer = conversation.more(response, sampled=True)
                    conversations[branch] = longer if last else longer.more(feedback, sampled=False)
            sequences += conversations
        rewards = np.repeat(random.random(EPISODES, dtype=np.float32), BRANCHES)
        episodes = np.repeat(np.arange(EPISODES), BRANCHES)
        groups.append(packed(seq, sequences, rewards, episodes=episodes, behavior_logprob=uniform(vocabulary)))
    return groups


def calls_of(group: TrajectoryGroup) -> TrajectoryGroup:
    """The same group with a trajectory for each call: its context, which is all that came before, and its response."""
    calls: list[MaskedTokens] = []
    of: list[int] = []
    for index in range(group.size):
        begin, end = group.bounds(index)
        ids, mask = group.packed_input_ids[begin:end], group.packed_loss_mask[begin:end]
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        calls += [MaskedTokens(ids[:stop], np.arange(stop) >= start) for start, stop in edges]
        of += [index] * len(edges)
    behavior = group.packed_behavior_logprobs[group.packed_loss_mask][0]
    return packed(group.seq, calls, group.rewards[of], episodes=group.episodes[of], behavior_logprob=behavior)


class MaskedTokens(NamedTuple):
    """A sequence; arrays of the shape `[tokens]`."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """True where a token is under the loss."""

    @classmethod
    def of_prompt(cls, prompt: NDArray[np.int64]) -> MaskedTokens:
        return cls(prompt, np.zeros(len(prompt), bool))

    def more(self, ids: NDArray[np.int64], *, sampled: bool) -> MaskedTokens:
        return MaskedTokens(np.concatenate([self.ids, ids]), np.concatenate([self.mask, np.full(len(ids), sampled)]))

    def as_context(self) -> MaskedTokens:
        return MaskedTokens(self.ids, np.zeros_like(self.mask))


def packed(
    seq: int,
    sequences: Sequence[MaskedTokens],
    rewards: NDArray[np.float32] | None = None,
    *,
    prompt: int = PROMPT,
    episodes: Iterable[int] = (),
    behavior_logprob: float = 0.0,
) -> TrajectoryGroup:
    """A group of `sequences` behind a common prompt of `prompt` tokens, all of policy version 0. `episodes`: of each
    sequence; by default each is an episode of its own."""
    mask = np.concatenate([sequence.mask for sequence in sequences])
    return TrajectoryGroup(
        seq=seq,
        worker="rollout/0",
        prompt_length=prompt,
        seqlens=np.array([len(sequence.ids) for sequence in sequences], np.int32),
        rewards=np.zeros(len(sequences), np.float32) if rewards is None else rewards,
        packed_input_ids=np.concatenate([sequence.ids for sequence in sequences]).astype(np.int32),
        packed_loss_mask=mask,
        packed_behavior_logprobs=np.where(mask, np.float32(behavior_logprob), np.float32(0)),
        packed_policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        finish_reasons=["stop"] * len(sequences),
        episodes=np.array([*episodes] or range(len(sequences)), np.int32),
    )


def uniform(vocabulary: NDArray[np.int64]) -> float:
    """The log-probability of a uniform policy: ratios to it are near 1."""
    return float(-np.log(len(vocabulary)))


def sampled(groups: list[TrajectoryGroup]) -> int:
    """Tokens in the loss."""
    return sum(int(group.packed_loss_mask.sum()) for group in groups)


def advantages(group: TrajectoryGroup) -> NDArray[np.float32]:
    """`[sequences]`: of each episode's reward among those of the group."""
    _, firsts = np.unique(group.episodes, return_index=True)
    rewards = group.rewards[firsts]
    found = (rewards - rewards.mean()) / (rewards.std(ddof=1) + ADVANTAGE_EPS)
    return found[group.episodes].astype(np.float32)
