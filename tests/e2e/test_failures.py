"""Failures that need a run of their own: a slow disk, a pool that is asked to end, a lost reward, wrong weights."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.records import lineage as lineages
from streamrl.records import progress
from tests.e2e.harness import (
    COPY_SCRATCH,
    QUICK,
    SMALL,
    Command,
    assert_exactly_once,
    assert_none_missing,
    calling,
    overrides,
    process_of,
    start,
    start_command,
    steps,
    summary,
    trained_seqs,
    until,
    wait_for_steps,
    wait_until_gone,
)
from tests.e2e.lies import checkpoints_take_long, gserver_1_keeps_its_weights

FOR_EVER: dict[str, Any] = QUICK | {"run__total_train_steps": 4000}
FIGURES = ("loss", "grad_norm", "lr", "entropy", "kl", "kl_coef", "sampling_diff_max", "reward_mean", "tokens_trained")


def test_a_run_that_goes_back_gives_the_losses_of_one_that_did_not_bit_for_bit(tmp_path: Path) -> None:
    """Synchronous, with one deterministic gserver; two rollout workers race each other, and the KL is steered."""
    exact = SMALL | {
        "run__total_train_steps": 16,
        "trainer__save_every": "2 steps",
        "trainer__save_at_end": "false",
        "trainer__batch_groups": 6,
        "rollout__workers": 2,
        "staleness__max_staleness": 0,
        "gserver__deterministic": "true",
        "algorithm__kl_coef": 0.01,
        "algorithm__kl_target": 0.001,
        "algorithm__minibatches": 2,
    }
    whole, killed = (start(COPY_SCRATCH, overrides(tmp_path, name, **exact)) for name in ("whole", "killed"))
    wait_for_steps(tmp_path / "killed", 5)
    process_of(tmp_path / "killed", "model-worker").kill()
    killed.ends_well()
    whole.ends_well()
    (rewind,) = lineages.read(tmp_path / "killed")
    assert rewind.cause.startswith("model_worker/0")
    expected, found = steps(tmp_path / "whole"), steps(tmp_path / "killed")
    assert [step["step"] for step in found] == list(range(1, 17))
    for want, got in zip(expected, found, strict=True):
        assert got["seqs"] == want["seqs"]
        assert {name: got["metrics"][name] for name in FIGURES} == {name: want["metrics"][name] for name in FIGURES}
    assert len({step["metrics"]["loss"] for step in expected}) == 16


def test_a_second_ctrl_c_stops_a_slow_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "impatient"
    settings = overrides(tmp_path, "impatient", **FOR_EVER, trainer__snapshot_every_steps=0)
    process = start(COPY_SCRATCH, settings, variables=calling(checkpoints_take_long, tmp_path))
    wait_for_steps(run_dir, 3)
    process.signal(signal.SIGINT)
    until((run_dir / "checkpoints").exists, "the beginning of the checkpoint", seconds=60)
    time.sleep(1)
    assert process.running
    process.signal(signal.SIGINT)
    assert process.exit_code(seconds=20) == 130, process.output[-4000:]
    wait_until_gone(run_dir, seconds=10)
    assert progress.checkpoints(run_dir) == []
    assert summary(run_dir)["state"] == "stopped"


def test_a_pool_that_is_asked_to_end_has_the_run_saved_before(tmp_path: Path) -> None:
    """As on a cluster, which starts all pools again after the trainer has ended with an error."""
    run_dir = tmp_path / "by-hand"
    settings = overrides(tmp_path, "by-hand", **FOR_EVER)
    pools: dict[str, Command] = {}

    def by_hand(role: str, *words: str) -> None:
        pools[role] = start_command([role, str(COPY_SCRATCH), *settings, *words])

    try:
        by_hand("controller", "--port", "0")
        listens = re.compile(r"http://[\d.]+:\d+")
        until(lambda: listens.search(pools["controller"].said), "the controller's address", seconds=60)
        url = listens.search(pools["controller"].said)[0]  # type: ignore[index]
        for role in ("gserver", "trainer", "rollout"):
            by_hand(role, "--manager", url)
        wait_for_steps(run_dir, 3)
        pools["trainer"].signal(signal.SIGTERM)
        codes = {role: process.exit_code(seconds=60) for role, process in pools.items()}
    finally:
        for process in pools.values():
            process.end()
    assert codes == {"gserver": 0, "rollout": 0, "trainer": 128 + signal.SIGTERM, "controller": 1}
    (checkpoint,) = progress.checkpoints(run_dir)
    assert progress.read(checkpoint).policy_version == len(steps(run_dir)) >= 3
    wait_until_gone(run_dir, seconds=10)


def test_a_stalled_rollout_worker_that_returns_in_the_middle_of_a_retry_doubles_nothing(tmp_path: Path) -> None:
    """It has lost its leases, and finishes the retry of a response after another worker has made the group."""
    run_dir, notes = tmp_path / "stalled", tmp_path / "notes"
    notes.mkdir()
    settings = {
        **QUICK,
        "rollout__reward__function": "tests.e2e.failing:first_call_then_block",
        "rollout__reward__args": f"{{folder = {json.dumps(str(notes))}, siblings = {QUICK['rollout__group_size']}}}",
        "rollout__reward__timeout_seconds": 600,
        "rollout__workers": 2,
        "limits__silence_seconds": 2,
        "run__total_train_steps": 12,
        "staleness__over_age": "wait",
    }
    process = start(COPY_SCRATCH, overrides(tmp_path, "stalled", **settings))
    blocked = notes / "blocked"
    try:
        until(lambda: blocked.exists() and blocked.read_text().endswith("\n"), "a retry", seconds=240)
        pid, seq = map(int, blocked.read_text().split())
        worker = psutil.Process(pid)
        worker.suspend()
        wait_for_steps(run_dir, 1)
        until(lambda: seq in trained_seqs(run_dir), "another worker's group", seconds=240)
        worker.resume()
        (notes / "go").touch()
        process.ends_well()
    finally:
        process.end()
    assert_exactly_once(run_dir)
    assert_none_missing(run_dir)
    assert summary(run_dir)["steps"] == 12
    wait_until_gone(run_dir, seconds=10)


@pytest.mark.timeout(600)
def test_a_gserver_that_keeps_its_old_weights_is_named_within_two_versions(tmp_path: Path) -> None:
    """One of two. No checksum can detect it: what it has made ready is right, and it reports that it serves it."""
    settings = FOR_EVER | {
        "gserver__count": 2,
        "staleness__max_staleness": 4,
        "trainer__logprob_diff_warning": 0.005,
        "trainer__logprob_diff_limit": 0.01,
        "weights__mode": "collective",
    }
    lying = calling(gserver_1_keeps_its_weights, tmp_path)
    process = start(COPY_SCRATCH, overrides(tmp_path, "lies", **settings), variables=lying)
    assert process.exit_code() == 1, process.output[-4000:]
    assert re.search(
        r"gserver/1 and the trainer differ by \S+ nats .* version [12], more than trainer.logprob_diff_limit",
        process.said,
    ), process.output[-4000:]
    assert "gserver/0 and the trainer" not in process.said
    made = [step["metrics"] for step in steps(tmp_path / "lies")]
    assert 2 <= len(made) <= 3
    for version, metrics in enumerate(made):
        # On a busy machine the next weights come before one has answered, now and then.
        assert metrics.get("logprob_diff_max/gserver_0", 0.0) < 1e-4
        if (liars := metrics.get("logprob_diff_max/gserver_1")) is not None:
            assert (liars < 1e-4) == (version == 0)
