"""The comparison of what was planned with what runs did: of the same steps."""

from __future__ import annotations

import pytest

from streamrl.records.metrics import StepReport
from tests.planner.test_simulation import costs_of, settings_of
from tests.test_figures import benchmark

bench_plan = benchmark("bench_plan")

SECONDS = 25.0
"""Of a training step, which is longer than generation takes: staleness builds up in the first steps."""


def made(steps: int, *, eta: int) -> list[StepReport]:
    """The steps of a run whose groups have 11 tokens, all of one version."""
    metrics = {"groups": 1.0, "tokens_trained": 11.0, "tokens_masked": 0.0}
    return [
        StepReport(step=step, time=step * SECONDS, metrics=metrics, token_ages={min(step - 1, eta): 11})
        for step in range(1, steps + 1)
    ]


@pytest.mark.parametrize(("first", "last", "age"), [(1, 3, 1.5), (2, 4, 2.0), (5, 12, 2.0)])
def test_a_stretch_of_a_run_is_compared_with_the_same_steps_of_the_plan(first: int, last: int, age: float) -> None:
    stretch = bench_plan.Stretch("", False, made(12, eta=2)[first - 1 : last])
    predicted = stretch.predicted(settings_of(eta=2), costs_of(train=SECONDS))
    actual = stretch.figures()
    assert actual == {
        "groups_per_second": pytest.approx(1 / SECONDS),
        "tokens_per_second": pytest.approx(11 / SECONDS),
        "mean_token_age": age,
        "masked_share": 0.0,
    }
    for name, value in actual.items():
        assert predicted[name] == pytest.approx(value, abs=0.1 if name == "mean_token_age" else 1e-9), name
