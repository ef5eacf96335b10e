"""What was learned lasts on data that are old, in the loop of benchmarks/delay.py: one process, the real objective."""

from __future__ import annotations

import importlib
from pathlib import Path
from statistics import fmean

import pytest

from streamrl.native.build import has_instructions

AFTERWARDS = 60
"""Steps for which a run goes on after it has learned."""
LOWEST = 0.9 if has_instructions("avx512f") else 0.8
"""Least mean reward of three steps after a run has learned. Processors without AVX-512 round differently, so that the
same seeds are other runs there, and one of them came down to 0.855 for some steps (docs/collapse.md). The decoupled
objective alone falls to 0.38 to 0.74."""
RUNS = [(versions, seed) for versions in (4, 8) for seed in (0, 1, 2)]
FALLING = [(4, 1), (4, 2), (8, 0)]
"""Those that are seen to fall without what the default has beside it: the decoupled objective alone is below 0.9 again
within `AFTERWARDS` (benchmarks/results/delay.json). The others are made with `-m slow`."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("versions", "seed"),
    [pytest.param(*run, marks=() if run in FALLING else pytest.mark.slow) for run in RUNS],
)
def test_what_was_learned_lasts(monkeypatch, versions, seed):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    delay = importlib.import_module("delay")
    found = delay.run("increment", "default", delay=versions, seed=seed, steps=170, afterwards=AFTERWARDS)
    assert found["learned"] is not None, found["reward"]
    assert len(found["reward"]) == found["learned"] + AFTERWARDS
    assert found["worst"] >= LOWEST, found["reward"]
    assert fmean(found["reward"][-10:]) >= 0.95, found["reward"]
