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
from streamrl.trainer.recording import read_recording
from streamrl.trainer.replay_plan import stretch
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

if "gserver" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("--index") + 1] == "1":
    from streamrl.gserver.embedded.weight_sets import WeightSets

    def exchange(self):
        self.make_ready()
        return self.live

    WeightSets.exchange = exchange
"""
"""As `sitecustomize.py`: gserver/1 stages new weights, says that it serves them, and goes on with the old ones."""


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


def test_a_killed_launcher_leaves_no_process_and_its_run_goes_on_with_another_number_of_workers(tmp_path):
    run_dir = tmp_path / "resumed"
    settings = overrides(
        tmp_path,
        "resumed",
        **(QUICK | {"run__total_train_steps": 34, "trainer__save_every_steps": 4}),
        staleness__over_age="wait",  # trains in admission order, so a lost group would be a gap
        run__record="true",
    )
    process = start(COPY_SCRATCH, settings)
    reader, _ = collected(process)
    wait_for_steps(run_dir, 9)
    process.kill()
    process.wait(10)
    wait_until_gone(run_dir, seconds=15)
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

    recorded = read_recording(run_dir)
    assert [(part.begins_at, part.last, len(part.folders)) for part in recorded.parts] == [
        (0, saved, 1),
        (saved, 34, 2),
    ]
    for number in (1, saved, saved + 1, 34):
        seqs = [group.seq for rank in recorded.load(number) for group in rank.groups]
        assert sorted(seqs) == sorted(after[number - 1]["seqs"])
    changed = "from there on the run had another trainer.data_parallel, trainer.shard"
    assert stretch(recorded) == (1, saved, changed)

    done = start(COPY_SCRATCH, [*settings, "run.total_train_steps=32", "--resume"])
    reader, output = collected(done)
    assert done.wait(60) == 2
    reader.join(10)
    assert "is done: it made 32 steps" in "".join(output).replace("\n", " ")


FIGURES = ("loss", "grad_norm", "lr", "entropy", "kl", "kl_coef", "sampling_diff_max", "reward_mean", "tokens_trained")


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
    process_of(tmp_path / "killed", "model-worker").kill()  # the run cannot go on without: it stops, and says why
    assert exit_code(killed, outputs[1][1], seconds=40) == 1
    outputs[1][0].join(10)
    said = "".join(outputs[1][1])
    assert "model_worker/0" in said
    assert "SIGKILL" in said
    wait_until_gone(tmp_path / "killed", seconds=2)
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


@pytest.mark.parametrize("mode", ["collective", "disk"])
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


def test_a_killed_gserver_is_sent_the_weights_by_the_other_and_ctrl_c_ends_the_run(tmp_path):
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
    assert exit_code(process, output, seconds=15) == 130, "".join(output)[-4000:]
    wait_until_gone(run_dir, seconds=2)
    reader.join(10)
    assert (run_dir / "summary.json").exists()
    compared = [step["metrics"].get("logprob_diff_max", 0.0) for step in steps(run_dir)]
    assert max(compared) < 1e-4


def test_a_stopped_gserver_is_ended_and_replaced_and_what_it_ran_goes_on(tmp_path):
    """The only one. Its connections stay open: nobody but the manager can notice that it does nothing."""
    run_dir = tmp_path / "stopped"
    settings = overrides(
        tmp_path,
        "stopped",
        **(QUICK | {"run__total_train_steps": 20, "rollout__workers": 1}),
        gserver__restart_delay_seconds=0.1,
        staleness__over_age="wait",
    )
    process = start(COPY_SCRATCH, settings)
    reader, output = collected(process)
    wait_for_steps(run_dir, 4)
    process_of(run_dir, "gserver").suspend()
    assert exit_code(process, output, seconds=100) == 0, "".join(output)[-4000:]
    reader.join(10)
    assert_exactly_once(run_dir)
    trained = sorted(seq for step in steps(run_dir) for seq in step["seqs"])
    assert trained == list(range(20 * 16))
    compared = [step["metrics"].get("logprob_diff_max", 0.0) for step in steps(run_dir)]
    assert max(compared) < 1e-4  # the new one took the current weights, from shared memory
    assert "gserver/0 was ended, since the manager heard nothing of it" in " ".join("".join(output).split())
    wait_until_gone(run_dir, seconds=10)


def test_a_gserver_that_keeps_its_old_weights_is_named_within_two_versions(tmp_path, monkeypatch):
    """One of two. No checksum can see it: what it has staged is right, and it says that it serves it."""
    (tmp_path / "sitecustomize.py").write_text(LIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    settings = overrides(
        tmp_path,
        "lies",
        **QUICK,
        gserver__count=2,
        staleness__max_staleness=4,
        trainer__logprob_diff_warning=0.005,
        trainer__logprob_diff_limit=0.01,
        weights__mode="collective",
    )
    process = start(COPY_SCRATCH, settings)
    reader, output = collected(process)
    assert exit_code(process, output) == 1, "".join(output)[-4000:]
    reader.join(10)
    said = " ".join("".join(output).split())
    assert re.search(
        r"gserver/1 and the trainer differ by \S+ nats for each token[^:]*, under version [12], more than "
        r"trainer.logprob_diff_limit = 0.01: a gserver may serve other weights than it says",
        said,
    ), said[-4000:]
    assert "gserver/0 and the trainer" not in said
    made = [step["metrics"] for step in steps(tmp_path / "lies")]
    assert 2 <= len(made) <= 3
    for version, metrics in enumerate(made):
        assert metrics["logprob_diff_max/gserver_0"] < 1e-4
        assert (metrics["logprob_diff_max/gserver_1"] < 1e-4) == (version == 0)
        assert (metrics["gservers_compared"], metrics["gservers_not_compared"]) == (2, 0)


def test_every_gserver_is_compared_at_every_version_without_the_trainer_waiting(tmp_path):
    """Also with responses of any age, several optimizer steps in a step, and another temperature."""
    settings = overrides(
        tmp_path,
        "compared",
        **(QUICK | {"run__total_train_steps": 12}),
        gserver__count=2,
        staleness__max_staleness=4,
        algorithm__minibatches=2,
        rollout__sampling__temperature=0.8,
    )
    run(COPY_SCRATCH, settings)
    made = [step["metrics"] for step in steps(tmp_path / "compared")]
    assert len(made) == 12
    for metrics in made:
        assert metrics["logprob_diff_max/gserver_0"] < 1e-4
        assert metrics["logprob_diff_max/gserver_1"] < 1e-4
        assert metrics["gservers_not_compared"] == 0
        assert 0 < metrics["compare_tokens"] < 64
