"""Asynchronous runs that keep what they trained on, and replays of them: the same losses bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

from streamrl.trainer.replay.recording import read_recording
from tests.e2e.harness import COPY_SCRATCH, SMALL, overrides, run, start_command, steps, trained_seqs

SETTINGS = SMALL | {
    "run__total_train_steps": 6,
    "run__record": "true",
    "staleness__max_staleness": 4,
    "trainer__save_at_end": "false",
}


def replay(run_dir: Path, *words: str, fresh: bool = False) -> str:
    """`streamrl replay`, which has to succeed: what it said on one line."""
    process = start_command(["replay", str(run_dir), *words], fresh=fresh)
    try:
        return process.ends_well(seconds=200)
    finally:
        process.end()


def test_a_replayed_run_has_the_losses_of_the_run(tmp_path: Path) -> None:
    """On two ranks, so that output of model function calls moves between them before it is trained on."""
    more = {"trainer__data_parallel": 2, "algorithm__minibatches": 2, "algorithm__kl_coef": 0.01}
    run(COPY_SCRATCH, overrides(tmp_path, "live", **SETTINGS, **more))
    live = tmp_path / "live"
    recorded = read_recording(live).load(6)
    assert [step.rank for step in recorded] == [0, 1]
    assert sorted(group.seq for step in recorded for group in step.groups) == sorted(steps(live)[5]["seqs"])
    said = replay(live, "--to", str(tmp_path / "again"), fresh=True)
    assert "steps 1 to 6" in said
    assert "are the recorded ones, bit for bit" in said
    again = tmp_path / "again"
    for figure in ("loss", "grad_norm", "effective_sample_size", "entropy"):
        was = [step["metrics"][figure] for step in steps(live)]
        assert [step["metrics"][figure] for step in steps(again)] == was
    assert [step["token_ages"] for step in steps(again)] == [step["token_ages"] for step in steps(live)]
    assert trained_seqs(again) == trained_seqs(live)
    assert json.loads((again / "replay.json").read_text())["difference"] is None
    said = replay(live, "--steps", "3", "algorithm.loss=cispo", "trainer.lr=0.01")
    assert "algorithm.loss = 'cispo' instead of 'ppo'" in said
    other = steps(tmp_path / "live-replay")
    assert len(other) == 3
    assert other[2]["metrics"]["loss"] != steps(live)[2]["metrics"]["loss"]
