"""The objective of `actor_train`: the configured advantages, policy loss, penalties and their aggregation.

Shared by all backends, which provide their tokens as flat vectors. Losses are normalised by counts over the whole
minibatch, so parts of it may be computed one after another, on any rank, and added up.

No function here makes the host wait for a GPU: figures stay on the device of the loss, and facts that determine shapes
come from the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.config import AlgorithmConfig
from streamrl.trainer.algorithms.losses import BehaviorWeight, behavior_kl, behavior_weight, kl_estimate
from streamrl.trainer.algorithms.registry import PolicyLoss, policy_loss
from streamrl.trainer.algorithms.tokens import ClippedLoss, Tokens, sum_of_sequence

OF_EACH_AGE = frozenset(
    {"tokens", "clipped", "weight_limited", "policy_shift", "ratio", "ratio_squares", "ratio_deviation", "behavior_kl"}
)
"""Sums that are also computed for the tokens of each age separately, as `NAME/age_N`."""
LARGEST_LOG_WEIGHT = 300.0
"""Limit of a response's log weight `log Π ρ`; a larger one counts as this, so that squares stay finite."""


class Totals(NamedTuple):
    """Counts of the whole minibatch, over all ranks."""

    tokens: int
    """Tokens that enter the loss."""
    episodes: int
    longest: int
    """Maximal number of tokens of a response: the length in `constant` aggregation."""


class Objective(NamedTuple):
    loss: Tensor
    """Scalar, to be minimised: this part's share of the minibatch's loss."""
    sums: dict[str, Tensor]
    """Figures that add up over parts and ranks: float64 scalars, on the device of the loss."""
    maxima: dict[str, Tensor]


def objective(
    tokens: Tokens, algorithm: AlgorithmConfig, *, kl_coef: float, totals: Totals, loss_of: PolicyLoss | None = None
) -> Objective:
    """Return the contribution of `tokens` to the loss of the minibatch, and figures about them.

    `loss_of`: `policy_loss(algorithm)`, for callers with many parts.
    """
    corrected = behavior_weight(
        tokens.proximal_logprobs,
        tokens.behavior_logprobs,
        tokens.sequence,
        tokens.sequences,
        level=algorithm.behavior_weight_level,
        limit=algorithm.behavior_weight_limit,
        cap=algorithm.behavior_weight_cap,
        floor=algorithm.behavior_weight_floor,
    )
    policy = (loss_of or policy_loss(algorithm))(tokens)
    per_token = corrected.weight * policy.loss
    if algorithm.behavior_kl_coef > 0:
        pull = behavior_kl(tokens.logprobs, tokens.behavior_logprobs)
        per_token = per_token + algorithm.behavior_kl_coef * pull * (tokens.age > 0)
    sums: dict[str, Tensor] = {}
    if tokens.ref_logprobs is not None:
        kl = kl_estimate(tokens.logprobs, tokens.ref_logprobs, kind=algorithm.kl_estimator)
        sums["kl"] = (kl.detach() * tokens.weight).sum().double()
        if algorithm.kl_in == "loss":
            per_token = per_token + kl_coef * kl
    if algorithm.entropy_coef > 0:
        per_token = per_token - algorithm.entropy_coef * tokens.entropy
    loss = (per_token * tokens.weight * _shares(tokens, algorithm, totals)).sum()
    sums["loss"] = loss.detach().double()
    at_start = tokens.logprobs if algorithm.proximal == "behavior" else tokens.proximal_logprobs
    maxima = _add_figures(sums, tokens, policy, corrected, at_start.detach())
    return Objective(loss, sums, maxima)


def _shares(tokens: Tokens, algorithm: AlgorithmConfig, totals: Totals) -> Tensor:
    """Return the weight of each token's loss in the loss of the minibatch.

    `token`: 1 / tokens (DAPO); `sequence`: 1 / (tokens of its episode · episodes) (GRPO); `sum`: 1 / episodes (RLOO);
    `constant`: 1 / (longest response possible · episodes) (Dr. GRPO). An episode is one response, except for agents: an
    episode with branching conversations has the same total weight as any other.
    """
    match algorithm.loss_aggregation:
        case "token":
            return torch.full_like(tokens.logprobs, 1 / max(totals.tokens, 1), requires_grad=False)
        case "sequence":
            return 1 / (tokens.of_episode.to(tokens.logprobs.dtype) * max(totals.episodes, 1))
        case "sum":
            return torch.full_like(tokens.logprobs, 1 / max(totals.episodes, 1), requires_grad=False)
        case "constant":
            share = 1 / (totals.longest * max(totals.episodes, 1))
            return torch.full_like(tokens.logprobs, share, requires_grad=False)


def _add_figures(
    sums: dict[str, Tensor],
    tokens: Tokens,
    policy: ClippedLoss,
    corrected: BehaviorWeight,
    at_start: Tensor,
) -> dict[str, Tensor]:
    """Fill `sums`; return the maxima. `at_start`: log-probabilities before the step's first update.

    ρ = π / π_b of a token, before any limit, in float64. A token is *outward* where the gradient moves π further from
    π_b (A > 0 and ρ > 1, or A < 0 and ρ < 1), else *restoring*.
    """
    log_ratio = tokens.logprobs.detach().double() - tokens.behavior_logprobs.double()
    ratio = log_ratio.exp()
    positive, negative = tokens.advantages > 0, tokens.advantages < 0
    outward = (positive & (log_ratio > 0)) | (negative & (log_ratio < 0))
    of_tokens = {
        "tokens": torch.ones_like(ratio),
        "clipped": policy.clipped,
        "weight_limited": corrected.limited,
        "policy_shift": log_ratio.abs(),
        "ratio": ratio,
        "ratio_squares": ratio**2,
        "ratio_deviation": (ratio - 1).abs(),
        "behavior_kl": torch.expm1(log_ratio) - log_ratio,
        "log_ratio_squares": log_ratio**2,
        "ratio_above_2": log_ratio > math.log(2),
        "ratio_below_half": log_ratio < -math.log(2),
        "behavior_weight": corrected.weight,
        "entropy": tokens.entropy.detach(),
    }
    for sign, signed in (("positive", positive), ("negative", negative)):
        for direction, there in (("outward", signed & outward), ("restoring", signed & ~outward)):
            of_tokens[f"tokens/{sign}_{direction}"] = there
            of_tokens[f"clipped/{sign}_{direction}"] = there & policy.clipped
    values = torch.stack([value.double() for value in of_tokens.values()]) * tokens.weight
    by_age = values.new_zeros(len(values), tokens.ages[-1] + 1).index_add_(1, tokens.age, values)
    for name, found in zip(of_tokens, by_age, strict=True):
        sums[name] = found.sum()
        if name in OF_EACH_AGE:
            sums |= {f"{name}/age_{age}": found[age] for age in tokens.ages}
    log_weights = sum_of_sequence(log_ratio, tokens.sequence, tokens.sequences, mean=False)
    stands_for = sum_of_sequence(tokens.weight.double(), tokens.sequence, tokens.sequences, mean=True)
    weights = log_weights.clamp(max=LARGEST_LOG_WEIGHT).exp()
    sums["sequences"] = stands_for.sum()
    sums["sequence_weight"] = (weights * stands_for).sum()
    sums["sequence_weight_squares"] = (weights**2 * stands_for).sum()
    maxima = {"ratio": ratio.max()}
    if tokens.comparable_tokens:
        difference = torch.where(tokens.comparable, (at_start - tokens.behavior_logprobs).abs(), 0.0)
        sums["comparable_tokens"] = tokens.comparable.sum().double()
        sums["sampling_diff"] = difference.sum().double()
        maxima["sampling_diff"] = difference.max().double()
    return maxima
