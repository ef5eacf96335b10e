"""When the difference between engine and trainer is told, and when it stops the run."""

from __future__ import annotations

import logging

import pytest

from streamrl.config import from_dict
from streamrl.errors import ConfigError, TrainingError
from streamrl.trainer.mismatch import MismatchWatch


def watch(**trainer):
    return MismatchWatch(from_dict({"trainer": trainer}).trainer)


@pytest.mark.parametrize("figures", [{}, {"logprob_diff_mean": 0.05}, {"logprob_diff_mean": 1e-6}])
def test_small_differences_and_steps_without_fresh_responses_are_passed_over(figures, caplog):
    watch(logprob_diff_warning=0.05, logprob_diff_limit=0.2).look({"groups": 8} | figures, policy_version=3)
    assert not caplog.records


def test_a_large_one_is_told_with_the_version(caplog):
    with caplog.at_level(logging.WARNING):
        watch(logprob_diff_warning=0.05).look({"groups": 8, "logprob_diff_mean": 0.31}, policy_version=7)
    (record,) = caplog.records
    assert "differ by 0.31 nats" in record.getMessage()
    assert "under version 7, more than trainer.logprob_diff_warning = 0.05" in record.getMessage()


def test_beyond_the_limit_the_run_stops():
    with pytest.raises(
        TrainingError, match=r"differ by 0\.31 nats .* more than trainer\.logprob_diff_limit = 0\.3: a gs"
    ):
        watch(logprob_diff_limit=0.3).look({"groups": 8, "logprob_diff_mean": 0.31}, policy_version=7)


def test_a_limit_below_the_warning_is_refused():
    with pytest.raises(
        ConfigError, match=r"trainer\.logprob_diff_limit = 0\.01 is below trainer\.logprob_diff_warning"
    ):
        watch(logprob_diff_warning=0.05, logprob_diff_limit=0.01)
