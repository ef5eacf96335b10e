"""Failures of one process: errors that differ in figures alone are counted together."""

from __future__ import annotations

import pytest

from streamrl.errors import DataError, RewardError, RewardTimeout
from streamrl.records.timeline import FrequentFailure
from streamrl.rollout.activity import LONGEST_ERROR, Activity, in_one_line


def raised(seq: int, last: str) -> RewardError:
    return RewardError(f"reward function my:reward, seq {seq}: Traceback (most recent call last):\n  x\n{last}")


def test_the_most_frequent_failure_has_its_first_row() -> None:
    activity = Activity(idle="")
    activity.describe_row = lambda seq: f"row {2 * seq}"
    assert activity.frequent_failure() is None
    activity.unscored(1, raised(1, "KeyError: 'level'"))
    for seq, said in ((4, "'x'"), (5, "'it is \"y\"'"), (6, "'7'")):
        activity.unscored(seq, raised(seq, f"ValueError: invalid literal for int() with base 10: {said}"))
    activity.rejected(7, DataError("the prompt (row 7) has 9000 tokens"))
    error = "ValueError: invalid literal for int() with base 10: 'x'"
    assert activity.frequent_failure() == FrequentFailure(error, 3, "row 8")
    for seq in range(10, 14):
        activity.rejected(seq, DataError(f"the prompt (row {seq}) has {seq}000 tokens"))
    assert activity.frequent_failure() == FrequentFailure("DataError: the prompt (row 7) has 9000 tokens", 5, "row 14")


def test_a_reward_that_costs_its_group_is_counted_once() -> None:
    activity = Activity(idle="")
    error = raised(3, "KeyError: 'level'")
    activity.unscored(3, error)
    activity.rejected(3, error)
    assert (activity.reward_errors, activity.groups_rejected) == (1, 1)
    assert activity.frequent_failure() == FrequentFailure("KeyError: 'level'", 1, "seq 3")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RewardTimeout("seq 3: no answer"), "RewardTimeout: seq 3: no answer"),
        (raised(3, "KeyError: 'level'\n"), "KeyError: 'level'"),
        (ValueError(""), "ValueError: "),
        (ValueError("y" * 1000), f"ValueError: {'y' * (LONGEST_ERROR - 13)}…"),
    ],
)
def test_an_error_in_one_line(error: Exception, line: str) -> None:
    assert in_one_line(error) == line
