"""Runs that go back to a checkpoint: of each kind, during an evaluation, and after a wait for the controller."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from streamrl.records import lineage as lineages
from streamrl.transport.membership import Membership
from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    Command,
    assert_exactly_once,
    assert_none_missing,
    calling,
    largest_difference,
    manager_of,
    overrides,
    processes_of,
    start,
    start_command,
    steps,
    until,
    wait_for_status,
    wait_for_steps,
    wait_until_gone,
)

STEPS = 12
PATIENCE_SECONDS = 3.0
SETTINGS: dict[str, Any] = SMALL | {
    "run__total_train_steps": STEPS,
    "run__stop_at_reward": 2.0,
    "staleness__over_age": "wait",
    "trainer__save_every_steps": 2,
    "trainer__restart_delay_seconds": 0.01,
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


def test_an_evaluation_under_way_is_dropped_and_those_that_are_due_again_are_made(tmp_path: Path) -> None:
    command, run_dir = begin(
        tmp_path,
        evaluation__every_steps=2,
        evaluation__at_end="true",
        evaluation__prompts=40,
        evaluation__samples=4,
        evaluation__max_concurrent=2,
    )
    try:
        wait_for_steps(run_dir, 3)
        wait_for_status(manager_of(run_dir), lambda status: status.evaluation is not None and status.evaluation.running)
        kill(run_dir, "model-worker")
        ends_whole(command, run_dir, rewinds=1)
    finally:
        command.end()
    made = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    versions = [evaluation["policy_version"] for evaluation in made]
    assert versions == sorted(set(versions))
    assert versions[-1] == STEPS
    for evaluation in made:
        assert (evaluation["prompts"], evaluation["samples"], evaluation["rejected"]) == (40, 4, 0)
        assert evaluation["policy_version"] <= evaluation["oldest_version"] <= evaluation["newest_version"] <= STEPS


def be_impatient() -> None:
    """Have this process wait for the controller for seconds in place of minutes."""
    assert Membership.__init__.__kwdefaults__ is not None
    Membership.__init__.__kwdefaults__["patience"] = PATIENCE_SECONDS


def test_pools_start_all_again_that_the_controller_has_kept_waiting_too_long(tmp_path: Path) -> None:
    """Each pool by its own command; the controller is stopped for longer than the others' patience."""
    run_dir, variables = tmp_path / "mortal", calling(be_impatient, tmp_path)
    words = [str(COPY_SCRATCH), *overrides(tmp_path, "mortal", **SETTINGS)]
    controller = start_command(["controller", *words])
    commands = [controller]
    try:
        until(lambda: "--manager http" in controller.said, "the controller's URL", seconds=60)
        (url,) = set(re.findall(r"--manager (http://[\d.:]+)", controller.output))
        commands += [
            start_command([*pool, *words, "--manager", url], variables=variables)
            for pool in (["trainer"], ["gserver", "--count", "1"], ["rollout", "--count", "1"])
        ]
        wait_for_steps(run_dir, 3)
        controller.signal(signal.SIGSTOP)
        for pool in commands[1:]:
            until(lambda pool=pool: "has lost the manager" in pool.output, "the end of its processes", seconds=60)
        controller.signal(signal.SIGCONT)
        ends_whole(controller, run_dir, rewinds=1)
        for pool in commands[1:]:
            pool.ends_well(seconds=60)
    finally:
        for command in commands:
            command.end()
