"""What dies in mid-run costs nothing, or stops the run with a reason; nothing is left behind."""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from streamrl.records import lineage as lineages
from streamrl.records import progress
from streamrl.trainer.replay.plan import stretch
from streamrl.trainer.replay.recording import read_recording
from tests.e2e.harness import (
    COPY_SCRATCH,
    PACED,
    QUICK,
    SMALL,
    assert_exactly_once,
    assert_none_missing,
    assert_rollouts,
    calling,
    overrides,
    process_of,
    run,
    start,
    steps,
    summary,
    until,
    wait_for_steps,
    wait_for_words,
    wait_until_gone,
)
from tests.e2e.lies import checkpoints_take_long, gserver_1_keeps_its_weights

FOR_EVER: dict[str, Any] = QUICK | {"run__total_train_steps": 4000}
TWO_WORKERS: dict[str, Any] = QUICK | {"rollout__workers": 2, "limits__silence_seconds": 2}
SOON_BACK = {"restarts__delay_seconds": 0.1}


def compared(run_dir: Path) -> float:
    """The largest difference between gservers and trainer in what a token's log-probability is."""
    return max(step["metrics"].get("logprob_diff_max", 0.0) for step in steps(run_dir))


def test_a_killed_rollout_worker_loses_and_doubles_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    settings = TWO_WORKERS | {"run__total_train_steps": 30, "staleness__over_age": "wait"}
    process = start(COPY_SCRATCH, overrides(tmp_path, "killed", **settings))
    wait_for_steps(run_dir, 5)
    worker = process_of(run_dir, "rollout")
    worker.suspend()
    time.sleep(1.0)  # until it has been given groups, if it had none
    worker.kill()
    process.ends_well()
    assert_exactly_once(run_dir)
    assert summary(run_dir)["steps"] == 30
    assert_none_missing(run_dir)
    assert json.loads((run_dir / "final.json").read_text())["status"]["ledger"]["expired"] > 0
    wait_until_gone(run_dir, seconds=10)


def test_a_killed_launcher_leaves_no_process_and_its_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    run_dir = tmp_path / "resumed"
    settings = overrides(
        tmp_path,
        "resumed",
        **TWO_WORKERS,
        run__total_train_steps=34,
        trainer__save_every="4 steps",
        staleness__over_age="wait",
        run__record="true",
    )
    process = start(COPY_SCRATCH, [*settings, "trainer.data_parallel=2", "trainer.shard=true"])
    wait_for_steps(run_dir, 9)
    process.end()
    wait_until_gone(run_dir, seconds=60)
    before = steps(run_dir)
    saved = progress.read(progress.checkpoints(run_dir)[-1]).policy_version
    assert saved <= 24, "the run was nearly over when it was killed"
    stopped = time.time()
    (run_dir / "checkpoints" / "step-000099.unfinished").mkdir()

    found = progress.checkpoints(run_dir)[-1]
    assert len(list(found.glob("model-0000?-of-00002.safetensors"))) == 2  # gservers and trainer go on from parts

    said = run(COPY_SCRATCH, [*settings, "--resume"])
    assert f"resuming {run_dir} from {run_dir / 'checkpoints' / found.name}" in said, "copied from memory to the disk"
    assert_exactly_once(run_dir)
    after = steps(run_dir)
    assert [step["step"] for step in after] == list(range(1, 35))
    kept = [step for step in after if step in before]
    assert len(kept) == saved
    assert after[:saved] == kept  # the steps up to the checkpoint, untouched
    assert_none_missing(run_dir)
    left = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert left == {f"step-{saved:06d}", "step-000028", "step-000032"}
    began = kept[0]["time"] - kept[0]["metrics"]["step_seconds"]
    down = after[saved]["spans"][0][1] - stopped
    assert down > 0
    assert summary(run_dir)["train_seconds"] < after[-1]["time"] - began - down + 0.5, (
        "the time without a process counts"
    )

    assert_rollouts(run_dir, groups=4)
    recorded = read_recording(run_dir)
    assert [(part.begins_at, part.last, len(part.folders)) for part in recorded.parts] == [
        (0, saved, 2),
        (saved, 34, 1),
    ]
    for number in (1, saved, saved + 1, 34):
        seqs = [group.seq for rank in recorded.load(number) for group in rank.groups]
        assert sorted(seqs) == sorted(after[number - 1]["seqs"])
    changed = "from there on the run had another trainer.data_parallel, trainer.shard"
    assert stretch(recorded) == (1, saved, changed)

    done = start(COPY_SCRATCH, [*settings, "run.total_train_steps=32", "--resume"])
    assert done.exit_code(seconds=60) == 2
    assert "is done: it made 32 steps" in done.said


def test_groups_that_were_under_way_are_kept_when_a_model_worker_dies(tmp_path: Path) -> None:
    """Simulated responses take seconds, so at any time some are under way, and each is of several policies."""
    run_dir = tmp_path / "kept"
    settings = (
        SMALL
        | PACED
        | {
            "run__total_train_steps": 20,
            "trainer__save_every": "1 step",
            "trainer__save_at_end": "false",
            "staleness__max_staleness": 4,
        }
    )
    process = start(COPY_SCRATCH, overrides(tmp_path, "kept", **settings))
    wait_for_steps(run_dir, 6)
    process_of(run_dir, "model-worker").kill()
    process.ends_well()
    (death,) = lineages.read(run_dir)
    assert death.groups_kept > 0
    assert_exactly_once(run_dir)
    assert summary(run_dir)["steps"] == 20
    wait_until_gone(run_dir, seconds=10)


FIGURES = ("loss", "grad_norm", "lr", "entropy", "kl", "kl_coef", "sampling_diff_max", "reward_mean", "tokens_trained")


def test_a_run_that_goes_back_gives_the_losses_of_one_that_did_not_bit_for_bit(tmp_path: Path) -> None:
    """Synchronous, with one deterministic gserver; two rollout workers race each other, and the KL is steered."""
    exact = SMALL | {
        "run__total_train_steps": 24,
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
    said = killed.ends_well()
    assert "model_worker/0 was ended by SIGKILL" in said
    whole.ends_well()

    (death,) = lineages.read(tmp_path / "killed")
    assert death.cause.startswith("model_worker/0")
    expected, found = steps(tmp_path / "whole"), steps(tmp_path / "killed")
    assert [step["step"] for step in found] == list(range(1, 25))
    for want, got in zip(expected, found, strict=True):
        assert got["seqs"] == want["seqs"]
        assert {name: got["metrics"][name] for name in FIGURES} == {name: want["metrics"][name] for name in FIGURES}
    assert len({step["metrics"]["loss"] for step in expected}) == 24


def test_a_killed_gserver_comes_back_with_the_current_weights(tmp_path: Path) -> None:
    """The only one: nobody but the trainer has the weights. (From files: `test_a_stopped_gserver…`.)"""
    run_dir = tmp_path / "returned"
    settings = QUICK | SOON_BACK | {"run__total_train_steps": 24, "weights__mode": "collective"}
    process = start(COPY_SCRATCH, overrides(tmp_path, "returned", **settings))
    wait_for_steps(run_dir, 5)
    process_of(run_dir, "gserver").kill()
    said = process.ends_well()
    assert_exactly_once(run_dir)
    assert summary(run_dir)["steps"] == 24
    assert "it is started again (1 of 3, in 0.1 s)" in said
    assert "took the place of" in (run_dir / "logs" / "controller-0.log").read_text()
    assert compared(run_dir) < 1e-4  # what it sampled after its return is what the policy of that version samples
    wait_until_gone(run_dir, seconds=10)


def test_a_killed_gserver_is_sent_the_weights_again_and_ctrl_c_ends_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "returned"
    settings = FOR_EVER | SOON_BACK | {"gserver__count": 2, "weights__mode": "collective"}
    process = start(COPY_SCRATCH, overrides(tmp_path, "returned", **settings))
    wait_for_steps(run_dir, 5)
    process_of(run_dir, "gserver").kill()
    wait_for_words(run_dir / "logs" / "controller-0.log", r"gserver/\d serves weights 'default' instead of")
    wait_for_steps(run_dir, len(steps(run_dir)) + 5)
    process.signal(signal.SIGINT)
    assert process.exit_code(seconds=60) == 130, process.output[-4000:]
    wait_until_gone(run_dir, seconds=10)
    assert (run_dir / "summary.json").exists()
    assert compared(run_dir) < 1e-4


def test_ctrl_c_writes_a_checkpoint_from_which_the_run_is_resumed(tmp_path: Path) -> None:
    run_dir = tmp_path / "interrupted"
    settings = overrides(tmp_path, "interrupted", **FOR_EVER)
    process = start(COPY_SCRATCH, settings)
    wait_for_steps(run_dir, 3)
    assert not (run_dir / "checkpoints").exists()
    process.signal(signal.SIGINT)
    assert process.exit_code(seconds=60) == 130, process.output[-4000:]
    wait_until_gone(run_dir, seconds=10)
    made = len(steps(run_dir))
    (checkpoint,) = progress.checkpoints(run_dir)
    assert progress.read(checkpoint).policy_version == made >= 3
    assert "SIGINT: writing a checkpoint, for at most 60 s; once more to stop at once" in process.said
    assert (summary(run_dir)["state"], summary(run_dir)["message"]) == (
        "stopped",
        f"stopped on request after step {made}",
    )
    *_, last, command = process.output.strip().splitlines()
    assert last.endswith(f"checkpoint: {checkpoint}; resume with")
    words = shlex.split(command)
    assert words[:3] == ["streamrl", "run", str(COPY_SCRATCH)]
    assert sorted(words[3:]) == sorted([*settings, "--resume"])

    words = [*words[3:], f"run.total_train_steps={made + 2}"]
    said = run(COPY_SCRATCH, words)
    assert f"step {made + 1}/" in said
    assert f"step {made}/" not in said, "steps before the checkpoint are not shown again"
    assert_exactly_once(run_dir)
    assert [step["step"] for step in steps(run_dir)] == list(range(1, made + 3))


def test_a_second_ctrl_c_stops_a_slow_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "impatient"
    settings = overrides(tmp_path, "impatient", **FOR_EVER, trainer__snapshot_every_steps=0)
    process = start(COPY_SCRATCH, settings, variables=calling(checkpoints_take_long, tmp_path))
    wait_for_steps(run_dir, 3)
    process.signal(signal.SIGINT)
    until((run_dir / "checkpoints").exists, "the beginning of the checkpoint", seconds=60)
    time.sleep(2)
    assert process.running
    began = time.monotonic()
    process.signal(signal.SIGINT)
    assert process.exit_code(seconds=60) == 130, process.output[-4000:]
    assert time.monotonic() - began < 20
    wait_until_gone(run_dir, seconds=10)
    assert progress.checkpoints(run_dir) == []
    assert summary(run_dir)["state"] == "stopped"
    last = process.output.strip().splitlines()[-1]
    assert last.endswith(f"there is no checkpoint in {run_dir}, so nothing to resume")


def test_a_stopped_gserver_is_ended_and_replaced_and_what_it_ran_goes_on(tmp_path: Path) -> None:
    """The only one. Its connections stay open: nobody but the controller can notice that it does nothing."""
    run_dir = tmp_path / "stopped"
    settings = QUICK | SOON_BACK | {"run__total_train_steps": 20, "staleness__over_age": "wait"}
    settings |= {"weights__mode": "disk", "limits__silence_seconds": 5}
    process = start(COPY_SCRATCH, overrides(tmp_path, "stopped", **settings))
    wait_for_steps(run_dir, 4)
    process_of(run_dir, "gserver").suspend()
    said = process.ends_well(seconds=100)
    assert_exactly_once(run_dir)
    assert_none_missing(run_dir)
    assert summary(run_dir)["steps"] == 20
    assert compared(run_dir) < 1e-4  # the new one took the current weights, from the files that the trainer wrote
    assert not (run_dir / "weights").exists()
    assert "gserver/0 was ended, since the controller heard nothing of it" in said
    wait_until_gone(run_dir, seconds=10)


@pytest.mark.parametrize("trained", [{}, {"model__lora__rank": 8, "trainer__lr": 2e-2}], ids=["weights", "an adapter"])
def test_a_gserver_that_keeps_its_old_weights_is_named_within_two_versions(
    tmp_path: Path, trained: dict[str, Any]
) -> None:
    """One of two. No checksum can see it: what it has made ready is right, and it says that it serves it."""
    settings = (
        FOR_EVER
        | trained
        | {
            "gserver__count": 2,
            "staleness__max_staleness": 4,
            "trainer__logprob_diff_warning": 0.005,
            "trainer__logprob_diff_limit": 0.01,
            "weights__mode": "collective",
        }
    )
    lying = calling(gserver_1_keeps_its_weights, tmp_path)
    process = start(COPY_SCRATCH, overrides(tmp_path, "lies", **settings), variables=lying)
    assert process.exit_code() == 1, process.output[-4000:]
    assert re.search(
        r"gserver/1 and the trainer differ by \S+ nats for each token[^:]*, under version [12], more than "
        r"trainer.logprob_diff_limit = 0.01: a gserver may serve other weights than it reports",
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
        assert metrics["gservers_compared"] + metrics["gservers_not_compared"] == 2
