"""REINFORCE++ with a baseline: rewards less the mean of their group, credited to the last token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamrl.trainer.algorithms.advantages import centred, per_token


@per_token
def advantage(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `r - mean(r)` (REINFORCE++, https://arxiv.org/abs/2501.03262)."""
    return centred(rewards, episodes)
