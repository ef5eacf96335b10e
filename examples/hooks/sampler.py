"""A sampler of rows: those that the policy solves about half of the time, since they teach the most.

Try it:

    streamrl run examples/copy_scratch.toml data.sampler=examples.hooks.sampler:near_half data.size=500
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamrl.rows import RowResults


def near_half(
    results: RowResults, count: int, random: np.random.Generator, *, explore: float = 0.1
) -> NDArray[np.int64]:
    """Return `count` rows, each with a chance in proportion to p · (1 - p), for the mean reward p of its last group.

    Rows without a result count as p = 1/2; the share `explore` is added so that no row is forgotten.
    """
    rewards = np.nan_to_num(results.latest, nan=0.5).clip(0, 1).astype(np.float64)
    chances = rewards * (1 - rewards) + explore / 4
    return random.choice(len(chances), size=count, p=chances / chances.sum())
