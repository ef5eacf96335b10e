"""The tokens of a loss, and sums over them. All vectors have the shape `[tokens]`.

π is the current policy, π_p the proximal policy (the clip's centre), and π_b the behaviour policy, which sampled the
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Tokens that enter the loss; all tensors have the shape `[tokens]`.

    All tokens of a response that enter the loss are in the same `Tokens`.
    """

    logprobs: Tensor
    """Under the current policy; with a gradient."""
    entropy: Tensor
    """Entropy of the current policy's whole distribution; with a gradient if `entropy_coef > 0`."""
    behavior_logprobs: Tensor
    proximal_logprobs: Tensor
    ref_logprobs: Tensor | None
    """None without a KL term."""
    advantages: Tensor
    sequence: Tensor
    """int64: index of each token's response, in `0 … sequences - 1`."""
    sequences: int
    of_episode: Tensor
    """int64: number of tokens of the same episode that enter the loss."""
    age: Tensor
    """int64: age in policy versions."""
    ages: Sequence[int]
    """The different values of `age`, in ascending order."""
    comparable: Tensor
    """bool: sampled by the policy at the start of the step, so that engine and trainer have to agree."""
    comparable_tokens: int
    """Number of `comparable` tokens."""
    weight: Tensor
    """Factor of each token's loss and of its share in the figures; above 1 for a sample that stands for more tokens."""


class ClippedLoss(NamedTuple):
    """Per-token values, each of the shape `[tokens]`."""

    loss: Tensor
    """To be minimised; differentiable in the log-probabilities under the current policy."""
    clipped: Tensor
    """True where the clip took the gradient away (CISPO: where it bounded the ratio)."""


def clipped_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> ClippedLoss:
    """Return the clipped loss of PPO and GSPO, with ratio r:

        loss = -min(r · A, clip(r, 1 - clip_low, 1 + clip_high) · A)

    With `dual_clip` c > 1 the objective of a negative advantage is bounded from below by `c · A` (Ye et al.,
    https://arxiv.org/abs/1912.09729, eq. 5).
    """
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(free, bounded)
    clipped = bounded < free
    if dual_clip is not None:
        least = dual_clip * advantages
        hopeless = (advantages < 0) & (objective < least)
        objective = torch.where(hopeless, least, objective)
        clipped = clipped | hopeless
    return ClippedLoss(loss=-objective, clipped=clipped)


def sum_of_sequence(values: Tensor, sequence: Tensor, sequences: int, *, mean: bool) -> Tensor:
    """Return `[sequences]`: the sum, or the mean, of `values` over the tokens of each response."""
    total = values.new_zeros(sequences).index_add(0, sequence, values)
    if not mean:
        return total
    return total / tokens_of_sequence(sequence, sequences)


def tokens_of_sequence(sequence: Tensor, sequences: int) -> Tensor:
    """Return `[sequences]`: the number of tokens of each response, at least 1."""
    counts = torch.zeros(sequences, dtype=torch.int64, device=sequence.device)
    return counts.index_add_(0, sequence, torch.ones_like(sequence)).clamp(min=1)  # bincount makes the host wait
