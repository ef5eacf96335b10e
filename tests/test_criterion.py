"""The claims of the staleness study: they hold, fail or stay undecided where they should."""

from __future__ import annotations

import numpy as np
import pytest

from tests.test_figures import benchmark

criterion = benchmark("criterion")


def runs(count: int, *, seed: int, level: float = 0.98, delay: int = 0, noise: float = 0.01, points: int = 60):
    """Curves that rise to `level` after `delay`, with other noise in each run."""
    generator = np.random.default_rng(seed)
    versions = np.arange(points)
    curve = level / (1 + np.exp(-(versions - 12 - delay) / 3))
    return [np.clip(curve + generator.normal(0, noise, points), 0, 1) for _ in range(count)]


def answers(stale, eta: int = 4, count: int = 8) -> dict[str, str]:
    fresh = {"a": runs(count, seed=1)}
    found = [*criterion.claims(fresh, {"a": stale}, eta=eta), criterion.no_collapse(fresh, {"a": stale})]
    return {claim.name: claim.answer for claim in found}


def test_runs_as_good_as_the_synchronous_ones_hold():
    found = answers(runs(60, seed=2), count=60)
    assert found == {"area": "holds", "plateau error": "holds", "runs that collapse": "holds"}


def test_a_late_start_fails_by_its_area_and_a_worse_end_by_its_plateau():
    assert answers(runs(8, seed=2, delay=12))["area"] == "fails"
    assert answers(runs(8, seed=2, level=0.93))["plateau error"] == "fails"


def test_few_noisy_runs_decide_nothing():
    found = answers([curve * scale for curve, scale in zip(runs(3, seed=2), (0.85, 1.0, 1.03), strict=True)], count=3)
    assert found["area"] == "not decided"
    assert found["runs that collapse"] == "not decided"


@pytest.mark.parametrize(("recovers", "collapsed"), [(True, False), (False, True)])
def test_a_drop_that_heals_is_no_collapse(recovers, collapsed):
    curve = np.full(60, 0.97)
    curve[40:50] = 0.4
    curve[50:] = 0.97 if recovers else 0.5
    assert criterion.largest_drop(curve) > 0.5
    assert criterion.collapses(curve, 0.05) is collapsed


@pytest.mark.parametrize(("count", "total", "high"), [(0, 72, 0.0407), (1, 72, 0.0642), (3, 10, 0.6066)])
def test_bounds_of_a_share_are_the_published_ones(count, total, high):
    """Upper bounds from tables of the binomial distribution."""
    assert criterion.clopper_pearson(count, total)[1] == pytest.approx(high, abs=2e-4)


def test_lower_and_upper_bounds_mirror_each_other():
    low, high = criterion.clopper_pearson(3, 10)
    other = criterion.clopper_pearson(7, 10)
    assert (1 - high, 1 - low) == pytest.approx(other)


@pytest.mark.parametrize(("speed", "answer"), [(1.4, "holds"), (1.0, "not decided"), (0.8, "fails")])
def test_area_per_second_is_compared_by_task(speed, answer):
    generator = np.random.default_rng(5)
    fresh = {task: generator.normal(level, 0.03 * level, 8) for task, level in (("a", 1.0), ("b", 0.01))}
    stale = {task: speed * generator.permutation(rates) for task, rates in fresh.items()}
    (found,) = criterion.faster(fresh, stale | {"only stale": [1.0]})
    assert found.estimate == pytest.approx(speed)
    assert found.answer == answer


def test_synchronous_runs_pass_against_synchronous_runs(monkeypatch):
    monkeypatch.setattr(criterion, "DRAWS", 1000)
    kept = {"a": runs(8, seed=3), "b": runs(8, seed=4, level=0.95, noise=0.02)}
    assert criterion.passes_itself(kept, eta=4) >= 0.95


def test_bounds_cover_the_truth(monkeypatch):
    """The true ratio of two equal populations, 1, is above the lower bound in about 95% of all studies."""
    monkeypatch.setattr(criterion, "DRAWS", 500)
    above = 0
    for seed in range(200):
        found = criterion.claims({"a": runs(8, seed=2 * seed)}, {"a": runs(8, seed=2 * seed + 1)}, eta=4)
        above += found[0].low <= 1
    assert 0.88 <= above / 200 <= 0.99
