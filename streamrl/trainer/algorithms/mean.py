"""Dr. GRPO: rewards less the mean of their group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamrl.trainer.algorithms.advantages import centred


def advantage(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `r - mean(r)` (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    return centred(rewards, episodes)
