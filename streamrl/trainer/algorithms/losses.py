"""The losses that `algorithm.loss` names, and the parts that they share: the weights of older data, the pull towards
their policies, the distance from the reference, and the critic's loss. Pure functions over flat vectors of tokens.

Policies and shapes are as in `tokens.py`.

All objectives are decoupled (Hilton et al., "Batch size-invariance for policy optimization",
https://arxiv.org/abs/2110.00641; AReaL, https://arxiv.org/abs/2505.24298): a weight without gradient corrects for the
difference between π_b and π_p, independently of the clip's effect on π and π_p.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamrl.trainer.algorithms.tokens import ClippedLoss, Tokens, clipped_loss, sum_of_sequence

WeightLevel = Literal["token", "sequence", "geometric", "none"]
WeightLimit = Literal["truncate", "mask"]
KLEstimator = Literal["k1", "k2", "k3"]

LARGEST_CORRECTION = 0.2
"""Largest change in one update of the adaptive KL coefficient, as a share."""


def ppo(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> ClippedLoss:
    """Return PPO's clipped loss (https://arxiv.org/abs/1707.06347), token by token, with `r = π / π_p`:

        loss = -min(r · A, clip(r, 1 - clip_low, 1 + clip_high) · A)

    `clip_high > clip_low` is DAPO's clip-higher (https://arxiv.org/abs/2503.14476). `dual_clip`: see `clipped_loss`.
    """
    ratio = (tokens.logprobs - tokens.proximal_logprobs.detach()).exp()
    return clipped_loss(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gspo(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> ClippedLoss:
    """Return PPO's loss with the ratio of a whole response, the same for all its tokens:

        s = exp(mean over the response of log(π / π_p))

    (GSPO, https://arxiv.org/abs/2507.18071, eq. 5 and 7; use it with `sequence` aggregation). The mean is over the
    tokens that enter the loss. Its clip ranges are far smaller than PPO's: the paper uses 3e-4 and 4e-4.
    """
    shift = tokens.logprobs - tokens.proximal_logprobs.detach()
    ratio = sum_of_sequence(shift, tokens.sequence, tokens.sequences, mean=True).exp()[tokens.sequence]
    return clipped_loss(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def cispo(tokens: Tokens, *, clip_low: float, clip_high: float) -> ClippedLoss:
    """Return CISPO's loss: the clipped ratio is a weight without gradient, so that no token loses its gradient:

        loss = -clip(r, 1 - clip_low, 1 + clip_high) · A · log π      (r = π / π_p, no gradient)

    (CISPO, MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5).
    """
    ratio = (tokens.logprobs.detach() - tokens.proximal_logprobs.detach()).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return ClippedLoss(loss=-bounded * tokens.advantages * tokens.logprobs, clipped=bounded != ratio)


# --- shared parts ---


class BehaviorWeight(NamedTuple):
    """Per-token values, each of the shape `[tokens]`, without gradient."""

    weight: Tensor
    limited: Tensor
    """True where the limit changed the weight."""


def behavior_weight(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sequence: Tensor,
    sequences: int,
    *,
    level: WeightLevel,
    limit: WeightLimit,
    cap: float,
    floor: float = 0.0,
) -> BehaviorWeight:
    """Return the importance weight w of tokens that π_b sampled, for an objective centred at π_p.

    `level`, with `ρ_t = π_p / π_b` of one token:

    - `token`: `w_t = ρ_t`;
    - `sequence`: `w_t = Π ρ` over the tokens of the response that enter the loss;
    - `geometric`: the geometric mean of the same;
    - `none`: 1.

    `limit`:

    - `truncate`: `min(w, cap)` (truncated importance sampling, Espeholt et al., https://arxiv.org/abs/1802.01561);
    - `mask`: `w` where `floor <= w <= cap`, else 0 (masked importance sampling; AReaL's cap).
    """
    log_weight = (proximal_logprobs - behavior_logprobs).detach()
    if level == "none":
        log_weight = torch.zeros_like(log_weight)
    elif level != "token":
        log_weight = sum_of_sequence(log_weight, sequence, sequences, mean=level == "geometric")[sequence]
    weight = log_weight.exp()
    if limit == "truncate":
        limited = weight > cap
        return BehaviorWeight(weight.clamp(max=cap), limited)
    limited = (weight > cap) | (weight < floor)
    return BehaviorWeight(weight.masked_fill(limited, 0.0), limited)


def behavior_kl(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """Return `[tokens]`: a penalty that estimates KL(π_b || π) from tokens that π_b sampled, with ρ = π / π_b:

        ρ - 1 - log ρ        (for ρ > 2 continued as a straight line in log ρ)

    It is never negative, and unbiased up to that line (the estimator k3 of Schulman, "Approximating KL divergence",
    http://joschu.net/blog/kl-approx.html). Its gradient is (min(ρ, 2) - 1) · ∇ log π: towards π_b on both sides, and
    bounded, so that no single token outweighs the others. Mirror descent policy optimization
    (https://arxiv.org/abs/2005.09814) uses KL(π_b || π) as the penalty that keeps a policy near the one that wrote the
    data.
    """
    log_ratio = logprobs - behavior_logprobs
    bounded = log_ratio.clamp(max=math.log(2))
    return torch.expm1(bounded) - bounded + (log_ratio - bounded)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> ClippedLoss:
    """Return the error of a critic's `values` against `returns`, with a change of at most `clip` from `old_values` in
    one step:

        loss = max((V - R)², (clip(V, V_old - clip, V_old + clip) - R)²) / 2

    (PPO's value clipping as in Huang et al., https://arxiv.org/abs/2403.17031, detail 14); `clip` None for plain
    squares. All have the shape `[tokens]`; `clipped` is True where the clip took the gradient away.
    """
    free = (values - returns) ** 2
    if clip is None:
        return ClippedLoss(free / 2, torch.zeros_like(free, dtype=torch.bool))
    moved = values - old_values
    bounded = (old_values + moved.clamp(-clip, clip) - returns) ** 2
    # within the clip both errors are equal, but rounding may make them differ
    return ClippedLoss(torch.max(free, bounded) / 2, (bounded > free) & (moved.abs() > clip))


# --- the distance from the reference ---


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, kind: KLEstimator) -> Tensor:
    """Estimate KL(π || π_ref) from tokens sampled from π; all of the shape `[tokens]`.

    With `d = log π_ref - log π` (Schulman, "Approximating KL divergence",
    http://joschu.net/blog/kl-approx.html):

    - `k1`: `-d`, unbiased; as a loss its gradient is 0 on average, so it belongs into the reward;
    - `k2`: `d² / 2`, biased; as a loss its gradient is that of the true KL on average;
    - `k3`: `exp(d) - 1 - d`, unbiased and never negative.
    """
    d = ref_logprobs - logprobs
    match kind:
        case "k1":
            return -d
        case "k2":
            return d**2 / 2
        case "k3":
            return d.exp() - 1 - d


class KLCoefficient:
    """β, fixed or following a target for the KL of a token. All roles of a worker share one.

    After a training step with mean KL `k`: `β ← β · (1 + clip(k / target - 1, ±0.2) / horizon)` (Ziegler et al.,
    https://arxiv.org/abs/1909.08593, section 2.2, with the horizon in steps). The new β applies from the next step: a
    role that trains later in the same step, such as a critic after the actor, uses the old β.
    """

    def __init__(self, value: float, *, target: float | None, horizon: int) -> None:
        self.value = value
        """β of the current step."""
        self.next_value = value
        """β of the next step."""
        self._target = target
        self._horizon = horizon
        self._step: int | None = None

    @property
    def adapts(self) -> bool:
        return self._target is not None

    def begin_step(self, policy_version: int) -> None:
        """Begin the step from `policy_version`. Several roles may call this for the same step."""
        if policy_version != self._step:
            self._step = policy_version
            self.value = self.next_value

    def update(self, kl: float) -> None:
        """Compute the next β after all minibatches of a step; `kl`: mean KL of a token."""
        if self._target is None:
            return
        error = max(-LARGEST_CORRECTION, min(LARGEST_CORRECTION, kl / self._target - 1))
        self.next_value = self.value * (1 + error / self._horizon)

    def resume(self, value: float) -> None:
        """Continue with `value` if β follows a target. A fixed β is the configured one. So is a β after a run
        with β = 0: otherwise it would stay 0 forever."""
        if self.adapts and value > 0:
            self.value = self.next_value = value
