"""Runs of each kind that go back to a checkpoint after the death of a model worker, and then of the controller."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from streamrl.records import lineage as lineages
from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    Command,
    assert_exactly_once,
    assert_none_missing,
    largest_difference,
    overrides,
    processes_of,
    start,
    steps,
    wait_for_steps,
    wait_until_gone,
)

STEPS = 12
SETTINGS: dict[str, Any] = SMALL | {
    "run__total_train_steps": STEPS,
    "run__stop_at_reward": 2.0,
    "staleness__over_age": "wait",
    "trainer__save_every": "2 steps",
    "restarts__delay_seconds": 0.01,
    "trainer__save_at_end": "false",
}
CRITIC: dict[str, Any] = {
    "algorithm__advantage": "gae",
    "algorithm__kl_coef": 0.05,
    "algorithm__ref_update_every": 3,
    "critic__lr": 1e-3,
}
KINDS: dict[str, dict[str, Any]] = {
    "synchronous graph": CRITIC
    | {
        "trainer__graph": "synchronous",
        "trainer__data_parallel": 2,
        "staleness__max_staleness": 0,
        "rollout__workers": 2,
    },
    "named adapters": {"model__lora__rank": 8, "weights__lora": "adapter", "algorithm__kl_coef": 1e-3},
    "megatron": CRITIC | {"trainer__backend": "megatron", "trainer__tensor_parallel": 2},
}


def begin(folder: Path, **settings: Any) -> tuple[Command, Path]:
    """Start a run; return the command and the run's folder."""
    return start(COPY_SCRATCH, overrides(folder, "mortal", **SETTINGS, **settings)), folder / "mortal"


def kill(run_dir: Path, role: str) -> None:
    """Kill one process of `role`."""
    random.choice([process for process in processes_of(run_dir) if role in process.cmdline()]).kill()


def ends_whole(command: Command, run_dir: Path, *, rewinds: int) -> None:
    """Wait for the end of the run, which has gone back `rewinds` times and trained on each prompt exactly once."""
    command.ends_well(seconds=200)
    assert [lineage.cause.split("/")[0] for lineage in lineages.read(run_dir)] == ["model_worker", "controller"][
        :rewinds
    ]
    assert [step["step"] for step in steps(run_dir)] == list(range(1, STEPS + 1))
    assert_exactly_once(run_dir)
    assert_none_missing(run_dir)
    wait_until_gone(run_dir, seconds=10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_each_kind_goes_back_and_reaches_its_last_step(kind: str, tmp_path: Path) -> None:
    if kind == "megatron":
        pytest.importorskip("megatron.core")
    command, run_dir = begin(tmp_path, **KINDS[kind])
    try:
        wait_for_steps(run_dir, 3)
        kill(run_dir, "model-worker")
        wait_for_steps(run_dir, 7)
        kill(run_dir, "controller")
        ends_whole(command, run_dir, rewinds=2)
    finally:
        command.end()
    assert largest_difference(run_dir) < 1e-3
    assert all(step["metrics"].get("critic/loss", 1.0) > 0 for step in steps(run_dir))
