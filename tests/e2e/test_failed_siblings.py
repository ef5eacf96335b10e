"""Siblings fail in whole runs: groups heal, shrink, and are trained on once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.records.rollouts import Rollouts
from streamrl.trainer.replay.recording import read_recording
from tests.e2e.harness import (
    COPY_SCRATCH,
    assert_exactly_once,
    assert_none_missing,
    assert_rollouts,
    overrides,
    run,
    start,
    steps,
    summary,
    trained_seqs,
    until,
    wait_for_steps,
    wait_until_gone,
)

SIBLINGS, GROUPS = 8, 16
SMALL: dict[str, Any] = {
    "trainer__batch_groups": GROUPS,
    "rollout__group_size": SIBLINGS,
    "trainer__save_at_end": "false",
}


def settings(folder: Path, name: str, function: str, *, args: dict[str, Any] | None = None, **more: Any) -> list[str]:
    (folder / "notes").mkdir()
    pairs = {"folder": str(folder / "notes"), **(args or {})}
    written = ", ".join(f"{key} = {json.dumps(value)}" for key, value in pairs.items())
    reward = {"rollout__reward__function": f"tests.e2e.failing:{function}", "rollout__reward__args": f"{{{written}}}"}
    return overrides(folder, name, **SMALL, **reward, **more)


@pytest.mark.timeout(600)
def test_at_five_percent_failures_at_least_98_percent_of_the_groups_are_trained_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "healed"
    run(COPY_SCRATCH, settings(tmp_path, "healed", "now_and_then", run__total_train_steps=12))
    assert_exactly_once(run_dir)
    found = summary(run_dir)
    failures = len(list((tmp_path / "notes").iterdir()))
    assert failures > 0.02 * 12 * GROUPS * SIBLINGS
    assert found["groups_trained"] == 12 * GROUPS
    assert found["groups_rejected"] <= 0.02 * found["groups_trained"]
    assert 0 < found["siblings_retried"] <= failures
    assert found["groups_shrunk"] == 0
    of_steps = [step["metrics"] for step in steps(run_dir)]
    assert 0 < sum(metrics["siblings_retried"] for metrics in of_steps) <= found["siblings_retried"]
    assert all(metrics["groups_shrunk"] == 0 for metrics in of_steps)


@pytest.mark.timeout(600)
def test_shrunk_groups_are_trained_on_recorded_and_kept(tmp_path: Path) -> None:
    run_dir = tmp_path / "shrunk"
    more = {
        "rollout__on_failed_sibling": "shrink",
        "rollout__min_siblings": 4,
        "run__total_train_steps": 6,
        "run__record": "true",
        "algorithm__minibatches": 2,
        "trainer__data_parallel": 2,
        "metrics__rollouts_per_step": GROUPS,
    }
    run(COPY_SCRATCH, settings(tmp_path, "shrunk", "now_and_then", **more))
    assert_exactly_once(run_dir)
    found = summary(run_dir)
    of_steps = sum(step["metrics"]["groups_shrunk"] for step in steps(run_dir))
    assert 0 < of_steps <= found["groups_shrunk"]
    assert found["siblings_retried"] == 0
    assert_rollouts(run_dir, groups=GROUPS)
    recording = read_recording(run_dir)
    loaded = [len(group.seqlens) for step in range(1, 7) for rank in recording.load(step) for group in rank.groups]
    kept = Rollouts(run_dir).rows.select(["step", "seq"]).to_pylist()
    sizes = Counter(Counter((row["step"], row["seq"]) for row in kept).values())
    assert set(sizes) <= set(range(4, SIBLINGS + 1))
    assert sum(count for size, count in sizes.items() if size < SIBLINGS) == of_steps
    assert Counter(loaded) == sizes


@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ["killed", "stalled"])
def test_a_worker_that_is_lost_in_the_middle_of_a_retry_loses_and_doubles_nothing(end: str, tmp_path: Path) -> None:
    """A stalled one loses its leases, and finishes the retry after another worker has made the group."""
    run_dir = tmp_path / end
    more = {
        "rollout__workers": 2,
        "rollout__reward__timeout_seconds": 600,
        "limits__silence_seconds": 2,
        "run__total_train_steps": 12,
        "staleness__over_age": "wait",
    }
    args = {"siblings": SIBLINGS}
    process = start(COPY_SCRATCH, settings(tmp_path, end, "first_call_then_block", args=args, **more))
    blocked = tmp_path / "notes" / "blocked"
    try:
        until(lambda: blocked.exists() and blocked.read_text().endswith("\n"), "a retry", seconds=240)
        pid, seq = map(int, blocked.read_text().split())
        worker = psutil.Process(pid)
        if end == "killed":
            worker.kill()
        else:
            worker.suspend()
            wait_for_steps(run_dir, 1)
            until(lambda: seq in trained_seqs(run_dir), "another worker's group", seconds=240)
            worker.resume()
            (tmp_path / "notes" / "go").touch()
        process.ends_well()
    finally:
        process.end()
    assert_exactly_once(run_dir)
    assert_none_missing(run_dir)
    assert summary(run_dir)["steps"] == 12
    assert trained_seqs(run_dir).count(seq) == 1
    wait_until_gone(run_dir, seconds=10)
