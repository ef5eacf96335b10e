"""An advantage: the distance from the group's mean reward, relative to that mean, so that rare successes count more.

Try it:

    streamrl run examples/copy_scratch.toml algorithm.advantage=examples.hooks.advantage:relative
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def relative(
    rewards: NDArray[np.float32], episodes: NDArray[np.int64], *, least_mean: float = 0.05
) -> NDArray[np.float32]:
    """Return (r - mean(r)) / mean(r) for each response to one prompt. `episodes` numbers an agent's attempts."""
    mean = float(rewards.mean())
    return (rewards - np.float32(mean)) / np.float32(max(mean, least_mean))
