"""What all contenders of `bench_trainer.py` are given, and what they answer.

The batch is drawn from a seed, so that every contender trains on the same tokens. The learning rate
is so small that a step does all of its work and yet leaves the weights, within float32, as they
were: after any number of rounds all contenders still have the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig

from streamrl.types import TrajectoryGroup

SIBLINGS, PROMPT = 8, 64
MEAN, SIGMA, LONGEST = 64, 0.8, 256
"""Of the log-normal response lengths, in tokens."""
EPISODES, TURNS, BRANCHES = 4, 8, 2
"""Of an agents' group; half-way through its turns an episode goes on in several ways."""
TURN_TOKENS = 32
"""Of the response in each turn, and of the feedback after it."""
MICRO_TOKENS = 4096
"""Of a micro-batch: padding counts."""
LR, BETAS, GRAD_CLIP = 1e-9, (0.9, 0.95), 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ADVANTAGE_EPS = 1e-4
"""Added to the deviation of a group's rewards."""


class Found(NamedTuple):
    """What an optimizer step saw."""

    loss: float
    grad_norm: float
    """Before clipping."""


Step = Callable[[list[TrajectoryGroup]], Found]
"""One optimizer step: forward, backward, clipping, AdamW."""


def trainable_tokens(folder: Path) -> NDArray[np.int64]:
    """All token ids of the checkpoint except that of padding.

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
        calls = [(prompt, random.choice(vocabulary, n)) for n in lengths]
        groups.append(_group(seq, calls, vocabulary, random))
    return groups


def make_agents_groups(vocabulary: NDArray[np.int64], *, count: int, seed: int) -> list[TrajectoryGroup]:
    """Random prompts, each with the calls of `EPISODES`: the context of one is all that its episode has had."""
    random = np.random.default_rng(seed)
    groups = []
    for seq in range(count):
        prompt = random.choice(vocabulary, PROMPT)
        calls = []
        for _ in range(EPISODES):
            histories = [prompt]
            for turn in range(TURNS):
                if turn == TURNS // 2:
                    histories *= BRANCHES
                for branch, history in enumerate(histories):
                    response, feedback = random.choice(vocabulary, (2, TURN_TOKENS))
                    calls.append((history, response))
                    histories[branch] = np.concatenate([history, response, feedback])
        groups.append(_group(seq, calls, vocabulary, random))
    return groups


def _group(
    seq: int,
    calls: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
    vocabulary: NDArray[np.int64],
    random: np.random.Generator,
) -> TrajectoryGroup:
    """A trajectory of each call's context and response; log-probabilities are those of a uniform policy, so that ratios
    are near 1."""
    parts = [np.concatenate(call) for call in calls]
    mask = np.concatenate([np.arange(len(part)) >= len(call[0]) for part, call in zip(parts, calls, strict=True)])
    return TrajectoryGroup(
        seq=seq,
        worker="rollout/0",
        prompt_length=PROMPT,
        seqlens=np.array([len(part) for part in parts], np.int32),
        rewards=random.random(len(calls), dtype=np.float32),
        packed_input_ids=np.concatenate(parts).astype(np.int32),
        packed_loss_mask=mask,
        packed_behavior_logprobs=np.where(mask, np.float32(-np.log(len(vocabulary))), np.float32(0)),
        packed_policy_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reasons=["stop"] * len(calls),
    )


def sampled(groups: list[TrajectoryGroup]) -> int:
    """Tokens in the loss."""
    return sum(int(group.packed_loss_mask.sum()) for group in groups)
