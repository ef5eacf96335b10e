"""A run whose learning rate grows until the policy falls apart, stopped by the watch over its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.records import progress
from tests.e2e.harness import COPY_SCRATCH, overrides, processes_of, start, steps, summary


@pytest.mark.timeout(600)
def test_a_run_that_falls_apart_is_stopped_and_says_where_to_go_on(tmp_path: Path) -> None:
    """The learning rate rises from step to step: with the first ones the policy learns, later ones are too large."""
    settings = overrides(
        tmp_path,
        "apart",
        algorithm__on_collapse="stop",
        algorithm__behavior_kl_coef=0,
        trainer__batch_groups=16,
        trainer__lr=0.03,
        trainer__optimizer__warmup_steps=300,
        trainer__save_every="10 steps",
        trainer__keep_checkpoints=1,
        run__total_train_steps=200,
        run__stop_at_reward=2.0,
    )
    process = start(COPY_SCRATCH, settings)
    assert process.exit_code(seconds=400) == 1, process.output[-4000:]
    folder = tmp_path / "apart"
    made = steps(folder)
    found = summary(folder)
    assert found["state"] == "failed"
    assert [change["state"] for change in found["health"]][-1] == "collapsing"
    states = [step["health"].get("state", "healthy") for step in made]
    assert states.index("collapsing") == len(states) - 1
    healthy = progress.last_healthy(folder)
    last = progress.checkpoints(folder)[-1]
    assert healthy is not None
    assert states[progress.read(healthy).policy_version - 1] == "healthy"
    assert progress.read(last).policy_version == len(made)
    assert progress.read(last).watch.health.state == "collapsing"
    for part in ("the run is collapsing", "staleness.max_staleness=2 (now 4)", "trainer.lr=0.015 (now 0.03)"):
        assert part in process.said
    assert f"run.resume_from={healthy}" in process.said
    assert not processes_of(folder)
