"""Whole runs that are evaluated on held-out prompts, and that end by epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    assert_exactly_once,
    overrides,
    process_of,
    processes_of,
    run,
    start,
    steps,
    summary,
    trained_seqs,
    wait_for_steps,
    wait_until_gone,
)


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]


def test_a_run_of_epochs_is_evaluated_from_its_start_to_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "evaluated"
    settings = overrides(
        tmp_path,
        "evaluated",
        **SMALL,
        data__size=20,
        run__total_train_epochs=2,
        evaluation__at_start="true",
        evaluation__at_end="true",
        evaluation__every="2 steps",
        evaluation__prompts=16,
        evaluation__samples=4,
        evaluation__sampling__temperature=1.0,
        evaluation__pass_reward=0.2,
        trainer__save_every="1 epoch",
        trainer__keep_checkpoints=9,
    )
    said = run(COPY_SCRATCH, settings)
    assert "2 epochs are done after 5 steps" in said
    assert_exactly_once(run_dir)
    assert [step["metrics"]["epoch"] for step in steps(run_dir)] == [0.4, 0.8, 1.2, 1.6, 2.0]
    assert sorted(trained_seqs(run_dir)) == list(range(40))
    status = json.loads((run_dir / "final.json").read_text())["status"]
    assert status["ledger"]["next_seq"] == 40  # nothing was generated beyond the last epoch
    assert status["evaluation"]["last"]["policy_version"] == 5
    assert {folder.name for folder in (run_dir / "checkpoints").iterdir()} == {"final", "step-000003", "step-000005"}

    found = evaluations(run_dir)
    versions = [evaluation["policy_version"] for evaluation in found]
    assert versions[0] == 0
    assert versions[-1] == 5
    assert set(versions) <= {0, 2, 4, 5}  # one may give way to a later one
    assert len(versions) == len(set(versions))
    for evaluation in found:
        assert (evaluation["prompts"], evaluation["samples"], evaluation["rejected"]) == (16, 4, 0)
        assert evaluation["policy_version"] <= evaluation["oldest_version"] <= evaluation["newest_version"] <= 5
        assert 0 <= evaluation["reward_mean"] <= 1
        shares = [evaluation["pass_at"][k] for k in "1234"]
        assert shares == sorted(shares)
    assert found[-1]["oldest_version"] == 5
    assert [e["policy_version"] for e in summary(run_dir)["evaluations"]] == versions
    assert "evaluation of v5 reward" in said
    assert "held-out reward" in said
    wait_until_gone(run_dir, seconds=10)


def test_a_synchronous_graph_is_evaluated_from_its_start_to_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "synchronous"
    settings = overrides(
        tmp_path,
        "synchronous",
        **SMALL,
        trainer__graph="synchronous",
        staleness__max_staleness=0,
        run__total_train_steps=4,
        evaluation__at_start="true",
        evaluation__at_end="true",
        evaluation__prompts=16,
    )
    run(COPY_SCRATCH, settings)
    assert_exactly_once(run_dir)
    found = evaluations(run_dir)
    assert [evaluation["policy_version"] for evaluation in found] == [0, 4]
    assert [(evaluation["prompts"], evaluation["rejected"]) for evaluation in found] == [(16, 0)] * 2


def test_an_evaluation_survives_its_rollout_worker_and_a_resumed_run_goes_on_evaluating(tmp_path: Path) -> None:
    run_dir = tmp_path / "resumed"
    settings = overrides(
        tmp_path,
        "resumed",
        **SMALL,
        run__total_train_steps=40,
        limits__silence_seconds=2,
        evaluation__every="10 steps",
        evaluation__at_end="true",
        evaluation__prompts=64,
        trainer__save_every="10 steps",
    )
    process = start(COPY_SCRATCH, settings)
    wait_for_steps(run_dir, 3)
    process_of(run_dir, "rollout").kill()
    wait_for_steps(run_dir, 24)
    process.end()
    for victim in processes_of(run_dir):
        victim.kill()
    wait_until_gone(run_dir, seconds=10)
    assert "its prompts go to others" in process.said

    run(COPY_SCRATCH, [*settings, "--resume"])
    assert_exactly_once(run_dir)
    assert [step["step"] for step in steps(run_dir)] == list(range(1, 41))
    versions = [evaluation["policy_version"] for evaluation in evaluations(run_dir)]
    assert versions == sorted(set(versions))
    assert versions[-1] == 40
    assert set(versions) <= {10, 20, 30, 40}
    assert len(versions) >= 2
