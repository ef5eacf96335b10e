"""Published losses that streamrl has no setting for, as functions for `algorithm.loss`: the staleness study compares
them with the default.

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
