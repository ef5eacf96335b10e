"""A loss: REINFORCE with a truncated importance weight.

Try it:

    streamrl run examples/copy_scratch.toml algorithm.loss=examples.hooks.loss:reinforce \
        algorithm.behavior_weight_level=none algorithm.loss_args.cap=2.0
"""

from __future__ import annotations

from torch import Tensor

from streamrl.trainer.algorithms.tokens import Tokens


def reinforce(tokens: Tokens, *, cap: float = 5.0) -> Tensor:
    """Return the loss of each token: -min(π / π_b, cap) · A · log π, with the weight as a constant."""
    weight = (tokens.logprobs.detach() - tokens.behavior_logprobs).exp().clamp(max=cap)
    return -weight * tokens.advantages * tokens.logprobs
