"""Whole runs in which one reward in twenty fails: with retries hardly a group is lost; without them groups shrink."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from streamrl.records.rollouts import Rollouts
from streamrl.trainer.replay.recording import read_recording
from tests.e2e.harness import COPY_SCRATCH, assert_exactly_once, assert_rollouts, overrides, run, steps, summary

SIBLINGS, GROUPS, STEPS = 8, 16, 6
pytestmark = pytest.mark.timeout(600)


def run_with_failures(folder: Path, **more: Any) -> tuple[dict[str, Any], int]:
    """Make a run in `folder`; return its summary and the number of failures."""
    notes = folder / "notes"
    notes.mkdir()
    settings = {
        "trainer__batch_groups": GROUPS,
        "trainer__save_at_end": "false",
        "rollout__group_size": SIBLINGS,
        "rollout__reward__function": "tests.e2e.failing:now_and_then",
        "rollout__reward__args": f"{{folder = {json.dumps(str(notes))}}}",
        "run__total_train_steps": STEPS,
        **more,
    }
    run(COPY_SCRATCH, overrides(folder, "run", **settings))
    assert_exactly_once(folder / "run")
    failures = len(list(notes.iterdir()))
    assert failures > 0.02 * STEPS * GROUPS * SIBLINGS
    return summary(folder / "run"), failures


def test_at_five_percent_failures_at_least_98_percent_of_the_groups_are_trained_on(tmp_path: Path) -> None:
    found, failures = run_with_failures(tmp_path)
    assert found["groups_trained"] == STEPS * GROUPS
    assert found["groups_rejected"] <= 0.02 * found["groups_trained"]
    assert 0 < found["siblings_retried"] <= failures
    assert found["groups_shrunk"] == 0


def test_shrunk_groups_are_trained_on_recorded_and_kept(tmp_path: Path) -> None:
    found, failures = run_with_failures(
        tmp_path,
        rollout__on_failed_sibling="shrink",
        rollout__min_siblings=4,
        run__record="true",
        algorithm__minibatches=2,
        trainer__data_parallel=2,
        metrics__rollouts_per_step=GROUPS,
    )
    run_dir = tmp_path / "run"
    of_steps = sum(step["metrics"]["groups_shrunk"] for step in steps(run_dir))
    assert 0 < of_steps <= found["groups_shrunk"] <= failures
    assert found["siblings_retried"] == 0
    assert_rollouts(run_dir, groups=GROUPS)
    recording = read_recording(run_dir)
    ranks = [rank for step in range(1, STEPS + 1) for rank in recording.load(step)]
    loaded = [len(group.seqlens) for rank in ranks for group in rank.groups]
    kept = Rollouts(run_dir).rows.select(["step", "seq"]).to_pylist()
    sizes = Counter(Counter((row["step"], row["seq"]) for row in kept).values())
    assert set(sizes) <= set(range(4, SIBLINGS + 1))
    assert sum(count for size, count in sizes.items() if size < SIBLINGS) == of_steps
    assert Counter(loaded) == sizes
