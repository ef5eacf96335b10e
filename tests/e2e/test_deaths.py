"""A run in which processes of all kinds die again and again, and which reaches its last step by itself."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.records import lineage as lineages
from streamrl.records import snapshots
from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    assert_exactly_once,
    largest_difference,
    overrides,
    processes_of,
    start,
    steps,
    summary,
    until,
    wait_until_gone,
)

DEATHS = 20
"""Of processes of one run."""
STOPPED = {3: "model-worker", 11: "controller", 15: "rollout"}
"""Deaths at which a process is stopped (SIGSTOP) in place of killed: it takes longer until that is found."""
VICTIMS = ["controller", "model-worker", "model-worker", "gserver", "rollout", "reward"]
SETTINGS: dict[str, Any] = SMALL | {
    "staleness__max_staleness": 4,
    "trainer__data_parallel": 2,
    "trainer__snapshot_every_steps": 2,
    "trainer__save_at_end": "false",
    "restarts__number": 100,
    "restarts__delay_seconds": 0.01,
    "gserver__count": 2,
    "rollout__workers": 2,
    "limits__silence_seconds": 4,
    "run__stop_at_reward": 2.0,
}


def victims(run_dir: Path, role: str) -> list[psutil.Process]:
    """The living processes of `role`; reward processes are children of rollout workers."""
    if role != "reward":
        return [process for process in processes_of(run_dir) if role in process.cmdline()]
    return [child for worker in victims(run_dir, "rollout") for child in worker.children() if child.is_running()]


def has_made(run_dir: Path, count: int) -> bool:
    return (run_dir / "metrics.jsonl").exists() and len(steps(run_dir)) >= count


def kill_one(run_dir: Path, role: str, number: signal.Signals, *, chance: random.Random) -> None:
    """Send a signal to a process of `role` once there is one that is not stopped."""

    def sent() -> bool:
        try:
            running = [p for p in victims(run_dir, role) if p.status() != psutil.STATUS_STOPPED]
            if not running:
                return False
            chance.choice(running).send_signal(number)
        except psutil.Error:  # it has ended just now
            return False
        return True

    until(sent, f"a process of {role}", seconds=120)


@pytest.mark.timeout(1500)
def test_whatever_dies_the_run_reaches_its_last_step_by_itself(tmp_path: Path) -> None:
    chance = random.Random(7)
    run_dir = tmp_path / "mortal"
    last = 60 + 10 * DEATHS
    process = start(COPY_SCRATCH, overrides(tmp_path, "mortal", **SETTINGS, run__total_train_steps=last))
    died: list[str] = []
    for death in range(DEATHS):
        made = min(5 + 8 * death, last - 20)
        until(
            lambda made=made: not process.running or has_made(run_dir, made), f"step {made} after {died}", seconds=200
        )
        assert process.running, process.output[-6000:]
        time.sleep(chance.uniform(0.0, 2.0))
        role = STOPPED.get(death) or VICTIMS[death % len(VICTIMS)]
        kill_one(run_dir, role, signal.SIGSTOP if death in STOPPED else signal.SIGKILL, chance=chance)
        died.append(role)
    process.ends_well(seconds=400)
    assert_exactly_once(run_dir)
    assert [step["step"] for step in steps(run_dir)] == list(range(1, last + 1))
    assert summary(run_dir)["groups_lost"] == 0
    assert largest_difference(run_dir) < 1e-4, (
        "what is sampled after a death is what the policy of that version samples"
    )
    gone_back = lineages.read(run_dir)
    assert {lineage.cause.split("/")[0] for lineage in gone_back} == {"controller", "model_worker"}
    assert len(gone_back) >= died.count("controller")
    lost = [lineage.steps_lost for lineage in gone_back]
    assert max(lost) <= 8, f"steps lost although each second one has a snapshot in memory: {lost}"
    assert not snapshots.folder_of(run_dir).exists()
    wait_until_gone(run_dir, seconds=10)
