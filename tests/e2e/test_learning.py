"""Whole runs learn from scratch, at each staleness, under each policy for over-age tokens."""

from __future__ import annotations

import pytest

from tests.e2e.harness import COPY_SCRATCH, assert_exactly_once, overrides, run, steps, summary


@pytest.mark.parametrize("max_staleness", [0, 4])
@pytest.mark.parametrize("over_age", ["mask", "wait", "drop"])
def test_copy_is_learned(tmp_path, max_staleness, over_age):
    settings = overrides(
        tmp_path,
        "copy",
        staleness__max_staleness=max_staleness,
        staleness__over_age=over_age,
        run__steps=250,
        run__stop_at_reward=0.95,
        trainer__save_at_end="false",
    )
    output = run(COPY_SCRATCH, settings)
    run_dir = tmp_path / "copy"
    figures = summary(run_dir)
    recent = [step["metrics"]["reward_mean"] for step in steps(run_dir)[-5:]]
    assert sum(recent) / len(recent) >= 0.95, output[-3000:]
    assert figures["reward_first"] < 0.4
    assert_exactly_once(run_dir)
    if max_staleness == 0:
        assert figures["oldest_token_age"] == 0
        assert max(s["metrics"]["logprob_diff_max"] for s in steps(run_dir)) < 1e-3
    if over_age != "mask":
        assert figures["masked_share"] == 0
