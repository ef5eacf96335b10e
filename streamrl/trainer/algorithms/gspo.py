"""GSPO: a clip on the ratio of each response."""

from __future__ import annotations

from streamrl.trainer.algorithms.tokens import ClippedLoss, Tokens, clipped_loss, sum_of_sequence


def loss(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> ClippedLoss:
    """Return PPO's loss with the ratio of a whole response, the same for all its tokens:

        s = exp(mean over the response of log(π / π_p))

    (GSPO, https://arxiv.org/abs/2507.18071, eq. 5 and 7; use it with `sequence` aggregation). The mean is over the
    tokens that enter the loss. Its clip ranges are far smaller than PPO's: the paper uses 3e-4 and 4e-4.
    """
    shift = tokens.logprobs - tokens.proximal_logprobs.detach()
    ratio = sum_of_sequence(shift, tokens.sequence, tokens.sequences, mean=True).exp()[tokens.sequence]
    return clipped_loss(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
