"""GRPO: rewards normalised within their group."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from streamrl.trainer.algorithms.advantages import STD_EPS, centred, means_of_attempts


def advantage(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `(r - mean(r)) / (std(r) + 1e-4)`, with squares divided by `E - 1` (DeepSeekMath,
    https://arxiv.org/abs/2402.03300, eq. 3).

    Each of the `E` attempts counts once: its mean reward in `mean(r)`, the mean squared distance of its rewards from
    that in `std(r)`.
    """
    deviations = centred(rewards, episodes)
    squares = means_of_attempts(deviations**2, episodes)
    return deviations / (math.sqrt(squares.sum() / max(1, len(squares) - 1)) + STD_EPS)
