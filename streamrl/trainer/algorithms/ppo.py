"""PPO: a clip on the ratio of each token."""

from __future__ import annotations

from streamrl.trainer.algorithms.tokens import ClippedLoss, Tokens, clipped_loss


def loss(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> ClippedLoss:
    """Return PPO's clipped loss (https://arxiv.org/abs/1707.06347), token by token, with `r = π / π_p`:

        loss = -min(r · A, clip(r, 1 - clip_low, 1 + clip_high) · A)

    `clip_high > clip_low` is DAPO's clip-higher (https://arxiv.org/abs/2503.14476). `dual_clip`: see `clipped_loss`.
    """
    ratio = (tokens.logprobs - tokens.proximal_logprobs.detach()).exp()
    return clipped_loss(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
