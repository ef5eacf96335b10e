"""Published losses that streamrl has no setting for, as functions for `algorithm.loss`: `staleness.py` and `delay.py`
compare them with the default.

    streamrl run examples/copy_scratch.toml algorithm.loss=benchmarks.recipes:probability_masked \
        algorithm.behavior_weight_level=none algorithm.behavior_kl_coef=0
"""

from __future__ import annotations

from torch import Tensor

from streamrl.trainer.algorithms.tokens import Tokens


def probability_masked(tokens: Tokens, *, epsilon: float = 0.3, kl: float = 1e-3) -> Tensor:
    """Return the loss of each token in prime-rl's IPO, with its default constants:

        -ρ · A · [|π - π_b| <= epsilon] + kl · (log ρ)²        with ρ = π / π_b

    (https://docs.primeintellect.ai/prime-rl/ipo.md, read in November 2026). All tokens have the shape `[tokens]`.
    """
    log_ratio = tokens.logprobs - tokens.behavior_logprobs
    moved = tokens.logprobs.detach().exp() - tokens.behavior_logprobs.exp()
    return kl * log_ratio**2 - (moved.abs() <= epsilon) * log_ratio.exp() * tokens.advantages


def divergence_masked(tokens: Tokens, *, bound: float = 0.2, cap: float = 5.0) -> Tensor:
    """Return the loss of each token in DPPO with total variation (https://arxiv.org/abs/2602.04879): no update moves a
    token's probability further than `bound` away from π_b.

        -min(ρ, cap) · A · log π, if π - π_b is at most `bound` in the direction of A; else 0
    """
    moved = tokens.logprobs.detach().exp() - tokens.behavior_logprobs.exp()
    weight = (tokens.logprobs.detach() - tokens.behavior_logprobs).exp().clamp(max=cap)
    return -weight * (moved * tokens.advantages.sign() <= bound) * tokens.advantages * tokens.logprobs


def low_baseline(tokens: Tokens, *, below: float = 0.1, cap: float = 5.0) -> Tensor:
    """Return the loss of each token with a baseline below the mean for data of older policies (AsymRE,
    https://arxiv.org/abs/2506.20520): -min(ρ, cap) · (A + `below`) · log π."""
    weight = (tokens.logprobs.detach() - tokens.behavior_logprobs).exp().clamp(max=cap)
    return -weight * (tokens.advantages + below * (tokens.age > 0)) * tokens.logprobs
