"""Policy losses, as pure tensor functions over flat vectors of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """Per-token values, each of the shape `[tokens]`."""

    loss: Tensor
    """To be minimised; differentiable in `logprobs`."""
    clipped: Tensor
    """True where the clip took the gradient away."""
    behavior_weight: Tensor
    """The capped weight proximal / behaviour."""
    weight_capped: Tensor
    """True where the cap was reached."""


def decoupled_ppo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    behavior_weight_cap: float,
) -> PolicyLoss:
    """The decoupled PPO objective, token by token; all arguments have the shape `[tokens]`.

    With the current policy π, the proximal policy π_p (the clip's centre) and the behaviour
    policy π_b (which sampled the token):

        w = min(π_p / π_b, cap)                      (no gradient)
        r = π / π_p
        loss = -w · min(r · A, clip(r, 1 - clip_low, 1 + clip_high) · A)

    Hilton et al., "Batch size-invariance for policy optimization",
    https://arxiv.org/abs/2110.00641; capped behaviour weight as in AReaL,
    https://arxiv.org/abs/2505.24298. With π_p = π_b it is PPO, https://arxiv.org/abs/1707.06347.
    """
    proximal_logprobs = proximal_logprobs.detach()
    uncapped = (proximal_logprobs - behavior_logprobs).exp()
    weight = uncapped.clamp(max=behavior_weight_cap)
    ratio = (logprobs - proximal_logprobs).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(
        loss=-weight * torch.min(free, bounded),
        clipped=bounded < free,
        behavior_weight=weight,
        weight_capped=uncapped > behavior_weight_cap,
    )


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(π || π_ref) for tokens sampled from π, `[tokens]`.

    `exp(d) - 1 - d` with `d = log π_ref - log π` (Schulman, "Approximating KL divergence",
    http://joschu.net/blog/kl-approx.html, estimator k3).
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - 1 - difference


def effective_sample_size(weights: Tensor) -> Tensor:
    """Share of the tokens that count after weighting: `(Σw)² / (n · Σw²)`, between 1/n and 1."""
    return weights.sum() ** 2 / (len(weights) * (weights**2).sum())
