"""What dies in mid-run costs nothing, or stops the run with a reason; nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from streamrl import progress
from tests.e2e.harness import COPY_SCRATCH, assert_exactly_once, overrides, processes_of, run, start, steps, summary

LONG = {
    "run__total_train_steps": 400,
    "trainer__save_at_end": "false",
    "manager__lease_seconds": 2,
    "rollout__workers": 2,
}
QUICK = LONG | {"trainer__batch_groups": 16, "rollout__group_size": 8}
"""A quarter of the responses, where it is all the same how long a step takes."""
LIES = """
import sys

if "gserver" in sys.orig_argv:
    from streamrl.gserver.embedded.weight_sets import WeightSets

    def exchange(self):
        self.make_ready()
        return self.live

    WeightSets.exchange = exchange
"""
"""As `sitecustomize.py`: the gserver stages new weights, says that it serves them, and goes on with the old ones."""


def wait_for_steps(run_dir: Path, count: int, *, seconds: float = 240.0) -> None:
    """Until the run has made `count` steps."""
    deadline = time.monotonic() + seconds
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, f"the run did not make {count} steps within {seconds:.0f} s"
        time.sleep(0.1)


def wait_for_words(log: Path, pattern: str, *, seconds: float = 120.0) -> None:
    """Until `log` has them."""
    deadline = time.monotonic() + seconds
    while not re.search(pattern, log.read_text()):
        assert time.monotonic() < deadline, f"{log} has no {pattern!r} after {seconds:.0f} s"
        time.sleep(0.1)


def process_of(run_dir: Path, role: str) -> psutil.Process:
    return next(p for p in processes_of(run_dir) if role in p.cmdline())


def wait_until_gone(run_dir: Path, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := processes_of(run_dir):
        assert time.monotonic() < deadline, [p.cmdline() for p in left]
        time.sleep(0.05)


def collected(process):
    """Read a process's output in the background, so that it never blocks on a full pipe."""
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(process.stdout), daemon=True)
    reader.start()
    return reader, output


def exit_code(process, output, *, seconds=180.0):
    """Once the process has ended."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {seconds:.0f} s; its last words:\n{''.join(output)[-4000:]}")


def test_a_killed_rollout_worker_loses_and_doubles_nothing(tmp_path):
    run_dir = tmp_path / "killed"
    settings = overrides(tmp_path, "killed", **(QUICK | {"run__total_train_steps": 30}), staleness__over_age="wait")
    process = start(COPY_SCRATCH, settings)
    reader, output = collected(process)
    wait_for_steps(run_dir, 5)
    worker = process_of(run_dir, "rollout")
    worker.suspend()
    time.sleep(1.0)  # until it has been given groups, if it had none
    worker.kill()
    assert exit_code(process, output) == 0, "".join(output)[-4000:]
    reader.join(10)
    assert_exactly_once(run_dir)
    assert summary(run_dir)["steps"] == 30
    trained = sorted(seq for step in steps(run_dir) for seq in step["seqs"])
    assert trained == list(range(len(trained)))  # "wait" trains in admission order: a lost group would be a gap
    assert json.loads((run_dir / "final.json").read_text())["status"]["ledger"]["expired"] > 0
    wait_until_gone(run_dir, seconds=10)


def test_a_rollout_worker_killed_in_a_synchronous_graph_is_made_up_for(tmp_path):
    run_dir = tmp_path / "sync"
    small = {"run__total_train_steps": 12, "trainer__batch_groups": 8, "rollout__group_size": 4}
    settings = overrides(tmp_path, "sync", **(LONG | small), trainer__graph="synchronous", staleness__max_staleness=0)
    process = start(COPY_SCRATCH, settings)
    reader, output = collected(process)
    wait_for_steps(run_dir, 2)
    process_of(run_dir, "rollout").send_signal(signal.SIGKILL)
    assert exit_code(process, output) == 0, "".join(output)[-4000:]
    reader.join(10)
    assert_exactly_once(run_dir)
    trained = sorted(seq for step in steps(run_dir) for seq in step["seqs"])
    assert trained == list(range(12 * 8))
    wait_until_gone(run_dir, seconds=10)


def kill_everything(process, run_dir):
    """As the end of a machine would."""
    for victim in [process, *processes_of(run_dir)]:
        victim.send_signal(signal.SIGKILL)
    process.wait(10)
    wait_until_gone(run_dir, seconds=10)


def test_a_run_goes_on_after_everything_was_killed_with_another_number_of_workers(tmp_path):
    run_dir = tmp_path / "resumed"
    settings = overrides(
        tmp_path,
        "resumed",
        **(QUICK | {"run__total_train_steps": 34, "trainer__save_every_steps": 4}),
        staleness__over_age="wait",  # trains in admission order, so a lost group would be a gap
    )
    process = start(COPY_SCRATCH, settings)
    reader, _ = collected(process)
    wait_for_steps(run_dir, 9)
    kill_everything(process, run_dir)
    reader.join(10)
    before = steps(run_dir)
    saved = progress.read(progress.checkpoints(run_dir)[-1]).policy_version
    assert saved <= 24, "the run was nearly over when it was killed"
    stopped = time.time()
    (run_dir / "checkpoints" / "step-000099.unfinished").mkdir()

    said = run(COPY_SCRATCH, [*settings, "trainer.data_parallel=2", "trainer.shard=true", "--resume"])
    assert "goes on from" in said
    assert_exactly_once(run_dir)
    after = steps(run_dir)
    assert [step["step"] for step in after] == list(range(1, 35))
    kept = [step for step in after if step in before]
    assert len(kept) == saved
    assert after[:saved] == kept  # the steps up to the checkpoint, untouched
    trained = sorted(seq for step in after for seq in step["seqs"])
    assert trained == list(range(len(trained)))
    left = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert left == {f"step-{saved:06d}", "step-000028", "step-000032"}
    began = kept[0]["time"] - kept[0]["metrics"]["step_seconds"]
    down = after[saved]["spans"][0][1] - stopped
    assert down > 0
    assert summary(run_dir)["train_seconds"] < after[-1]["time"] - began - down

    done = start(COPY_SCRATCH, [*settings, "run.total_train_steps=32", "--resume"])
    reader, output = collected(done)
    assert done.wait(60) == 2
    reader.join(10)
    assert "is done: it made 32 steps" in "".join(output).replace("\n", " ")


FIGURES = ("loss", "grad_norm", "lr", "entropy", "kl", "kl_coef", "logprob_diff_max", "reward_mean", "tokens_trained")


def test_a_killed_and_resumed_run_gives_the_losses_of_one_that_was_not_bit_for_bit(tmp_path):
    """Synchronous, with one deterministic gserver; two rollout workers race each other, and the KL is steered."""
    exact = LONG | {
        "run__total_train_steps": 8,
        "trainer__save_every_steps": 2,
        "trainer__keep_checkpoints": 1000,
        "trainer__batch_groups": 6,
        "rollout__group_size": 4,
        "staleness__max_staleness": 0,
        "gserver__deterministic": "true",
        "algorithm__kl_coef": 0.01,
        "algorithm__kl_target": 0.001,
        "algorithm__minibatches": 2,
    }
    whole, killed = (
        start(COPY_SCRATCH, overrides(tmp_path, name, **(exact | more)))
        for name, more in (("whole", {}), ("killed", {"run__total_train_steps": 200}))
    )
    outputs = [collected(process) for process in (whole, killed)]
    wait_for_steps(tmp_path / "killed", 5)
    kill_everything(killed, tmp_path / "killed")
    for folder in (tmp_path / "killed" / "checkpoints").glob("step-*"):
        if folder.name > "step-000004":  # the machine was quick: as if it had been killed earlier
            shutil.rmtree(folder)
    run(COPY_SCRATCH, [*overrides(tmp_path, "killed", **exact), "--resume"])
    assert whole.wait(120) == 0, "".join(outputs[0][1])[-4000:]

    expected, found = steps(tmp_path / "whole"), steps(tmp_path / "killed")
    assert [step["step"] for step in found] == list(range(1, 9))
    for want, got in zip(expected, found, strict=True):
        assert got["seqs"] == want["seqs"]
        assert {name: got["metrics"][name] for name in FIGURES} == {name: want["metrics"][name] for name in FIGURES}
    assert len({step["metrics"]["loss"] for step in expected}) == 8


def test_ctrl_c_leaves_no_process(tmp_path):
    run_dir = tmp_path / "stopped"
    process = start(COPY_SCRATCH, overrides(tmp_path, "stopped", **QUICK))
    reader, output = collected(process)
    wait_for_steps(run_dir, 2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert exit_code(process, output, seconds=20) == 130, "".join(output)[-4000:]
    assert time.monotonic() - began < 15
    reader.join(5)
    wait_until_gone(run_dir, seconds=2)
    assert (run_dir / "summary.json").exists()


@pytest.mark.parametrize("mode", ["collective", "disk", "shared_memory"])
def test_a_killed_gserver_comes_back_with_the_current_weights(tmp_path, mode):
    """The only one: nobody but the trainer, or the files that it wrote, has the weights."""
    run_dir = tmp_path / "returned"
    settings = overrides(
        tmp_path,
        "returned",
        **(QUICK | {"run__total_train_steps": 24, "rollout__workers": 1}),
        weights__mode=mode,
        gserver__restart_delay_seconds=0.1,
    )
    process = start(COPY_SCRATCH, settings)
    reader, output = collected(process)
    wait_for_steps(run_dir, 5)
    process_of(run_dir, "gserver").send_signal(signal.SIGKILL)
    assert exit_code(process, output) == 0, "".join(output)[-4000:]
    reader.join(10)
    assert_exactly_once(run_dir)
    assert summary(run_dir)["steps"] == 24
    assert "it is started again (1 of 3, in 0.1 s)" in " ".join("".join(output).split())
    log = (run_dir / "logs" / "manager-0.log").read_text()
    assert "took the place of" in log
    compared = [step["metrics"].get("logprob_diff_max", 0.0) for step in steps(run_dir)]
    assert max(compared) < 1e-4  # what it sampled after its return is what the policy of that version samples
    wait_until_gone(run_dir, seconds=10)
    assert not (run_dir / "weights").exists()


def test_a_killed_gserver_is_sent_the_weights_by_the_other(tmp_path):
    run_dir = tmp_path / "returned"
    settings = overrides(
        tmp_path,
        "returned",
        **(QUICK | {"run__total_train_steps": 4000, "rollout__workers": 1}),
        gserver__count=2,
        gserver__restart_delay_seconds=0.1,
        weights__mode="collective",
    )
    process = start(COPY_SCRATCH, settings)
    reader, output = collected(process)
    wait_for_steps(run_dir, 5)
    process_of(run_dir, "gserver").send_signal(signal.SIGKILL)
    wait_for_words(run_dir / "logs" / "manager-0.log", r"gserver/\d at \S+ caught up with weights v\d+ from gserver/\d")
    wait_for_steps(run_dir, len(steps(run_dir)) + 5)
    process.send_signal(signal.SIGINT)
    assert exit_code(process, output, seconds=60) == 130, "".join(output)[-4000:]
    reader.join(10)
    compared = [step["metrics"].get("logprob_diff_max", 0.0) for step in steps(run_dir)]
    assert max(compared) < 1e-4
    wait_until_gone(run_dir, seconds=10)


def test_the_death_of_a_process_stops_the_run_and_is_named(tmp_path):
    role = "model-worker"
    run_dir = tmp_path / "died"
    process = start(COPY_SCRATCH, overrides(tmp_path, "died", **QUICK))
    reader, output = collected(process)
    wait_for_steps(run_dir, 2)
    process_of(run_dir, role).send_signal(signal.SIGKILL)
    assert process.wait(40) == 1
    reader.join(5)
    text = "".join(output)
    assert role.replace("-", "_") in text.replace("-", "_")
    assert "SIGKILL" in text
    wait_until_gone(run_dir, seconds=2)


def test_a_killed_launcher_leaves_no_process(tmp_path):
    run_dir = tmp_path / "orphans"
    process = start(COPY_SCRATCH, overrides(tmp_path, "orphans", **QUICK))
    collected(process)
    wait_for_steps(run_dir, 2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(5)
    wait_until_gone(run_dir, seconds=15)


def test_weights_that_a_gserver_says_it_serves_and_does_not_are_noticed(tmp_path, monkeypatch):
    """No checksum can see it: what it has staged is right."""
    (tmp_path / "sitecustomize.py").write_text(LIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    limits = {"trainer__logprob_diff_warning": 0.005, "trainer__logprob_diff_limit": 0.01}
    settings = overrides(tmp_path, "lies", **QUICK, **limits, staleness__max_staleness=0, weights__mode="collective")
    process = start(COPY_SCRATCH, settings)
    reader, output = collected(process)
    assert exit_code(process, output) == 1, "".join(output)[-4000:]
    reader.join(10)
    said = " ".join("".join(output).split())
    assert "more than trainer.logprob_diff_limit" in said
    assert "a gserver may serve other weights than it says" in said
    compared = [step["metrics"]["logprob_diff_mean"] for step in steps(tmp_path / "lies")]
    assert compared[0] < 1e-4, "before the first update they agree"
