"""Tokens that are too old when their batch is formed are masked, or their groups dropped; `test_chaos` waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import COPY_SCRATCH, assert_exactly_once, overrides, run, summary

MAX_STALENESS = 4
STEPS = 16
STRAGGLERS: dict[str, Any] = {
    # Simulated generation with a long tail: some responses take longer than the trainer needs for many steps.
    "gserver__engine": "simulated",
    "gserver__max_running": 128,
    "gserver__simulation__token_seconds": 0.02,
    "gserver__simulation__mean_length": 8,
    "gserver__simulation__sigma": 1.5,
    "gserver__simulation__vocab_size": 8,
    "rollout__sampling__max_new_tokens": 56,
    "gserver__max_context": 64,
    "rollout__group_size": 4,
    "trainer__batch_groups": 4,
    "staleness__max_staleness": MAX_STALENESS,
    "staleness__most_drift": 0,
    "run__total_train_steps": STEPS,
    "run__stop_at_reward": 2.0,
    "trainer__save_at_end": "false",
}


@pytest.mark.parametrize("over_age", ["mask", "drop"])
def test_no_token_is_trained_on_that_is_too_old(tmp_path: Path, over_age: str) -> None:
    run_dir = tmp_path / over_age
    run(COPY_SCRATCH, overrides(tmp_path, over_age, **STRAGGLERS, staleness__over_age=over_age))
    assert_exactly_once(run_dir)
    figures = summary(run_dir)
    assert figures["steps"] == STEPS
    assert figures["oldest_token_age"] == MAX_STALENESS, "the run is one in which the bound matters"
    assert (figures["masked_share"] > 0) == (over_age == "mask")
    assert (figures["groups_dropped"] > 0) == (over_age == "drop")
