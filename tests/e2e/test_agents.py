"""Whole runs with agents: they learn, and what dies in mid-episode costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import (
    ROOT,
    assert_exactly_once,
    assert_none_missing,
    overrides,
    process_of,
    run,
    start,
    steps,
    summary,
    wait_for_steps,
    wait_until_gone,
)

GUESS_NUMBER = ROOT / "examples" / "guess_number.toml"
EASY: dict[str, Any] = {"data__args__highest": 3, "data__args__guesses": 2, "trainer__save_at_end": "false"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("max_staleness", [0, 4])
def test_an_agent_of_several_turns_learns(tmp_path: Path, max_staleness: int) -> None:
    settings = EASY | {
        "staleness__max_staleness": max_staleness,
        "trainer__batch_groups": 32,
        "run__total_train_steps": 120,
        "run__stop_at_reward": 0.85,
        "run__stop_window": 3,
    }
    run(GUESS_NUMBER, overrides(tmp_path, "guess", **settings), seconds=600)
    rewards = [step["metrics"]["reward_mean"] for step in steps(tmp_path / "guess")]
    assert sum(rewards[:3]) / 3 < 0.35
    assert sum(rewards[-3:]) / 3 > 0.8, rewards
    assert_exactly_once(tmp_path / "guess")


@pytest.mark.timeout(600)
def test_a_rollout_worker_killed_in_mid_episode_loses_and_doubles_nothing(tmp_path: Path) -> None:
    settings = EASY | {
        "rollout__workers": 2,
        "rollout__restart_delay_seconds": 0.1,
        "manager__lease_seconds": 2,
        "trainer__batch_groups": 8,
        "run__total_train_steps": 30,
        "run__stop_at_reward": 2.0,
        "staleness__over_age": "wait",
    }
    run_dir = tmp_path / "killed"
    process = start(GUESS_NUMBER, overrides(tmp_path, "killed", **settings))
    wait_for_steps(run_dir, 5)
    process_of(run_dir, "rollout").kill()
    process.ends_well()
    assert_exactly_once(run_dir)
    assert summary(run_dir)["steps"] == 30
    assert_none_missing(run_dir)
    wait_until_gone(run_dir, seconds=10)
