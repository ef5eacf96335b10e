"""RLOO: rewards less the mean of the other attempts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamrl.trainer.algorithms.advantages import all_equal, means_of_attempts


def advantage(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `r` minus the mean of the *other* attempts (RLOO, https://arxiv.org/abs/2402.14740, eq. 6)."""
    if all_equal(rewards):
        return np.zeros(len(rewards))
    means = means_of_attempts(rewards, episodes)
    others = (means.sum() - means) / max(1, len(means) - 1)
    advantages: NDArray[np.float64] = rewards - others[episodes]
    return advantages
