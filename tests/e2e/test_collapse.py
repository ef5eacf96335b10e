"""A run whose policy learns, and is then destroyed by its learning rate, is stopped by the watch over its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.records import progress
from tests.e2e.harness import COPY_SCRATCH, overrides, processes_of, start, steps, summary

LEARNING_STEPS = 55
REST_STEPS = 20


def rate(update: int, total_updates: int) -> float:
    """Return the share of `trainer.lr`. The policy learns, then stays as it is, so that its data become those of the
    present policy; then the rate grows to one that no policy survives.
    """
    learning = 0.02 * min(1.0, update / 10)
    grown = update - LEARNING_STEPS - REST_STEPS
    if update < LEARNING_STEPS:
        return learning
    return min(1.0, learning * 1.5**grown) if grown >= 0 else 0.0


@pytest.mark.timeout(600)
def test_a_run_that_falls_apart_is_stopped_and_says_where_to_go_on(tmp_path: Path) -> None:
    settings = overrides(
        tmp_path,
        "apart",
        algorithm__on_collapse="stop",
        algorithm__behavior_kl_coef=0,
        trainer__batch_groups=16,
        trainer__lr=0.1,
        trainer__optimizer__warmup_steps=0,
        trainer__optimizer__schedule="tests.e2e.test_collapse:rate",
        trainer__save_every="10 steps",
        trainer__keep_checkpoints=1,
        run__total_train_steps=100,
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
    assert len(states) > LEARNING_STEPS + REST_STEPS
    healthy = progress.last_healthy(folder)
    last = progress.checkpoints(folder)[-1]
    assert healthy is not None
    assert states[progress.read(healthy).policy_version - 1] == "healthy"
    assert progress.read(last).policy_version == len(made)
    assert progress.read(last).watch.health.state == "collapsing"
    for part in ("the run is collapsing", "staleness.max_staleness=2 (now 4)", "trainer.lr=0.05 (now 0.1)"):
        assert part in process.said
    assert f"run.resume_from={healthy}" in process.said
    assert not processes_of(folder)
