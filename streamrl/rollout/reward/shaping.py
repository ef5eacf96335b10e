"""What is taken from a response's reward besides the reward function's judgement."""

from __future__ import annotations


def overlong_share(output_tokens: int, *, most: int, buffer: int) -> float:
    """How much of the last `buffer` of `most` tokens a response of `output_tokens` uses, from 0 to 1.

    The soft overlong punishment of DAPO (https://arxiv.org/abs/2503.14476, eq. 13) is this, negated:
    a response that was cut should not be worth as much as one that ended, and the way there should
    be a slope, not a cliff. With `buffer` 0 there is no punishment.
    """
    if buffer == 0:
        return 0.0
    return min(1.0, max(0.0, (output_tokens - (most - buffer)) / buffer))
