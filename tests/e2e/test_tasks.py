"""A whole run of two tasks: it learns both, in the proportion of their weights, and reports them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ROOT, assert_exactly_once, overrides, run, steps, summary

SEEDS = (0, 1, 2)
"""As in `test_learning`."""
SETTINGS: dict[str, Any] = {
    "tasks__copy__data__args__digits": 2,
    "tasks__repeat__data__size": 100,
    "tasks__repeat__data__sampler": "examples.hooks.sampler:near_half",
    "rollout__sampling__max_new_tokens": 4,
    "run__total_train_steps": 150,
    "run__stop_at_reward": 0.85,
    "evaluation__prompts": 16,
}


@pytest.mark.timeout(1500)
def test_a_run_learns_two_tasks(tmp_path: Path) -> None:
    for seed in SEEDS:
        run_dir = tmp_path / f"seed-{seed}"
        run(ROOT / "examples" / "two_tasks.toml", overrides(tmp_path, run_dir.name, **SETTINGS, run__seed=seed))
        found = summary(run_dir)["tasks"]
        if min(own["reward_final"] for own in found.values()) > 0.6:
            break
    for own in found.values():
        assert own["reward_first"] + 0.3 < own["reward_final"], found
    assert_exactly_once(run_dir)
    groups = {name: sum(step["metrics"][f"task/{name}/groups"] for step in steps(run_dir)) for name in found}
    assert groups == {name: own["groups_trained"] for name, own in found.items()}
    assert groups["copy"] == pytest.approx(2 * groups["repeat"], rel=0.1)
    (report,) = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert {name: own["prompts"] for name, own in report["tasks"].items()} == {"copy": 16, "repeat": 16}
    progress = json.loads((run_dir / "checkpoints" / "final" / "state" / "progress.json").read_text())
    assert list(progress["rows"]["results"]) == ["repeat"]
    finished = sum(result[0] for result in progress["rows"]["results"]["repeat"].values())
    assert finished == groups["repeat"]
