"""CISPO: the clipped ratio as a weight."""

from __future__ import annotations

from streamrl.trainer.algorithms.tokens import ClippedLoss, Tokens


def loss(tokens: Tokens, *, clip_low: float, clip_high: float) -> ClippedLoss:
    """Return CISPO's loss: the clipped ratio is a weight without gradient, so that no token loses its gradient:

        loss = -clip(r, 1 - clip_low, 1 + clip_high) · A · log π      (r = π / π_p, no gradient)

    (CISPO, MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5).
    """
    ratio = (tokens.logprobs.detach() - tokens.proximal_logprobs.detach()).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return ClippedLoss(loss=-bounded * tokens.advantages * tokens.logprobs, clipped=bounded != ratio)
