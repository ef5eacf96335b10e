"""What was learned lasts on old data, in the loop of benchmarks/delay.py: one process, the real objective."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import numpy as np
import pytest

from streamrl.native.build import has_instructions
from tests.test_figures import benchmark

AFTERWARDS = 60
"""Steps for which a run goes on after it has learned."""
LOWEST = 0.9 if has_instructions("avx512f") else 0.8
"""Least mean reward of three steps after a run has learned. Processors without AVX-512 round differently, so that the
same seeds are other runs there, and one of them came down to 0.855 for some steps (docs/collapse.md). The decoupled
objective alone falls to 0.38 to 0.74."""


@pytest.mark.timeout(1500)
def test_what_was_learned_lasts() -> None:
    """With a delay and a seed with which the decoupled objective alone falls below 0.9 within `AFTERWARDS`."""
    found = benchmark("delay").run("increment", "default", delay=4, seed=1, steps=170, afterwards=AFTERWARDS)
    assert found["learned"] is not None, found["reward"]
    assert len(found["reward"]) == found["learned"] + AFTERWARDS
    assert found["worst"] >= LOWEST, found["reward"]
    assert fmean(found["reward"][-10:]) >= 0.95, found["reward"]


@pytest.mark.timeout(1500)
def test_two_tasks_do_not_collapse_more_often_than_the_study_claims() -> None:
    """At most two of eight runs: from the third on the claim of benchmarks/criterion.py is refuted. Of the decoupled
    objective alone five of six such runs collapse."""
    delay, criterion = benchmark("delay"), benchmark("criterion")
    collapsed = []
    for task, seed in product(("increment", "sort"), range(4)):
        rewards = delay.run(task, "default", delay=4, seed=seed, steps=150)["reward"]
        if criterion.collapses(np.reshape(rewards, (-1, 5)).mean(axis=1), criterion.DROP):
            collapsed.append((task, seed))
    low, high = criterion.clopper_pearson(len(collapsed), 8)
    assert criterion.at_most((0.0, low, high), criterion.COLLAPSES) != "fails", collapsed
