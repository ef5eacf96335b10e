"""REINFORCE++: rewards without a group, credited to the last token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamrl.trainer.algorithms.advantages import per_token


@per_token
def advantage(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return `r` itself (REINFORCE++, https://arxiv.org/abs/2501.03262)."""
    return rewards
