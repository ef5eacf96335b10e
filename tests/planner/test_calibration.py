"""What is read from the folder of a run, and what is said of folders that do not tell enough."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import from_dict, load
from streamrl.errors import ConfigError, StreamRLError
from streamrl.planner import calibration
from streamrl.planner.calibration import check_plannable, fit, make_short_run, read_calibration
from streamrl.planner.simulation import simulate
from streamrl.transport.membership import MACHINE_SECONDS
from tests.e2e.harness import COPY_SCRATCH as EXAMPLE
from tests.e2e.harness import processes_of
from tests.planner.runs import (
    CONTROL,
    EPOCH,
    GROUP,
    LENGTHS,
    OTHERS,
    PROMPT,
    REQUEST,
    REWARD,
    STEP,
    USED,
    write_calibration,
)


def test_costs_of_a_run_are_found(tmp_path: Path) -> None:
    found = read_calibration(write_calibration(tmp_path / "run"), cores=2)
    costs = found.costs
    assert costs.step_seconds == pytest.approx(STEP, rel=0.01)
    assert costs.request_seconds == pytest.approx(REQUEST, rel=0.01)
    assert costs.prompt_token_seconds == pytest.approx(PROMPT, rel=0.01)
    assert costs.prompt_tokens == pytest.approx(50)
    assert costs.group_seconds == pytest.approx(GROUP / 2)
    assert costs.reward_seconds == pytest.approx(GROUP / 2 / 2 + REWARD)
    assert costs.reward_wait_seconds == pytest.approx(0.02 - GROUP / 2 / 2 - REWARD)
    assert costs.overhead_seconds == pytest.approx(CONTROL)
    assert sorted(costs.response_lengths)[0] == sorted(LENGTHS)[0]
    assert costs.rejected_share == 0
    assert costs.cores == pytest.approx(2 - OTHERS)
    assert any("kept 0.2 of its 2 cores busy" in note for note in found.notes)
    assert costs.gservers_on_cores
    assert costs.trainer_on_cores
    assert found.steps == 10
    assert found.seconds == pytest.approx(20)
    train = costs.train_seconds + (160 + 200) * costs.train_token_seconds
    assert 0.9 * USED < train + costs.publish_seconds <= 1.01 * USED


def test_a_run_that_was_down_for_a_while_costs_the_same(tmp_path: Path) -> None:
    """Whatever the machine did meanwhile."""
    folder = write_calibration(tmp_path / "run")
    costs = read_calibration(folder, cores=2).costs
    down, resumed_at = 10_000.0, EPOCH + 14.5
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        step["metrics"]["run_seconds"] = step["time"] - EPOCH
        step["time"] += down if step["time"] > resumed_at else 0.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    beats = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    before = {beat["role"]: beat["stats"] for beat in beats if beat["time"] < resumed_at}
    for beat in beats:
        if beat["time"] > resumed_at:
            beat["time"] += down
            for name, count in before[beat["role"]].items():
                beat["stats"][name] += 2 * down if name == MACHINE_SECONDS else -count
    (folder / "timeline.jsonl").write_text("".join(json.dumps(beat) + "\n" for beat in beats))
    found = read_calibration(folder, cores=2)
    for cost in ("cores", "train_seconds", "group_seconds", "reward_seconds", "overhead_seconds", "prompt_tokens"):
        assert getattr(found.costs, cost) == pytest.approx(getattr(costs, cost), rel=0.08), cost
    assert found.seconds == pytest.approx(20)


def test_a_run_on_devices_of_its_own_is_timed_by_the_clock(tmp_path: Path) -> None:
    costs = read_calibration(write_calibration(tmp_path / "run", run={"device": "cuda"}), cores=2).costs
    assert not costs.gservers_on_cores
    assert not costs.trainer_on_cores
    assert costs.step_seconds == pytest.approx(1.1 * STEP, rel=0.01)
    assert costs.train_seconds == pytest.approx(0.3)
    assert costs.train_token_seconds == pytest.approx(1.1 / 360)
    assert costs.publish_seconds == pytest.approx(0.15)


def test_groups_that_were_dropped_cost_rewards_too(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "run")
    costs = read_calibration(folder).costs
    timeline = folder / "timeline.jsonl"
    beats = [json.loads(line) for line in timeline.read_text().splitlines()]
    for beat in beats:
        if beat["role"] == "rollout":
            beat["stats"]["groups_uniform_total"] = beat["stats"]["groups_done_total"]
    timeline.write_text("".join(json.dumps(beat) + "\n" for beat in beats))
    found = read_calibration(folder).costs
    assert found.rejected_share == pytest.approx(0.5)
    for cost in ("group_seconds", "reward_seconds", "reward_wait_seconds"):
        assert getattr(found, cost) == pytest.approx(getattr(costs, cost) / 2), cost


def test_an_agents_branches_are_counted(tmp_path: Path) -> None:
    """Rewards are counted by episodes in the run, and played by trajectories."""
    folder = write_calibration(tmp_path / "run")
    costs = read_calibration(folder).costs
    metrics = folder / "metrics.jsonl"
    branched = [[length for length in group for _ in range(3)] for group in LENGTHS]
    metrics.write_text(metrics.read_text().replace(json.dumps(LENGTHS), json.dumps(branched)))
    found = read_calibration(folder).costs
    assert sorted(found.response_lengths)[0] == sorted(branched)[0]
    assert found.group_size == 2
    assert found.reward_seconds == pytest.approx(costs.reward_seconds / 3)


def test_a_run_with_a_coroutine_reward_is_told_from_others(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "run")
    assert not read_calibration(folder).costs.rewards_at_once
    timeline = folder / "timeline.jsonl"
    busy = '"reward_busy_seconds_total"'
    timeline.write_text(timeline.read_text().replace(busy, f'"reward_calls_at_once": 64, {busy}'))
    assert read_calibration(folder).costs.rewards_at_once


def test_an_older_run_that_tells_no_processor_time(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "run")
    timeline = folder / "timeline.jsonl"
    timeline.write_text(timeline.read_text().replace("processor_seconds_total", "other"))
    found = read_calibration(folder)
    assert any("does not tell what processes cost" in note for note in found.notes)
    assert found.costs.train_seconds == pytest.approx(0.3)


def test_a_run_of_something_else_is_told(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "run")
    planned = from_dict({"trainer": {"dtype": "bfloat16", "batch_groups": 9}})
    notes = read_calibration(folder, planned=planned).notes
    assert sum("its costs are taken all the same" in note for note in notes) == 1
    assert any("trainer.dtype = 'auto'" in note for note in notes)


def test_simulated_gservers_cost_time_and_no_processor(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "run", gserver={"engine": "simulated"})
    costs = read_calibration(folder, cores=2).costs
    assert not costs.gservers_on_cores
    assert costs.request_seconds == 0
    assert costs.pace_sigma > 0


def test_the_first_steps_are_left_out(tmp_path: Path) -> None:
    assert read_calibration(write_calibration(tmp_path / "short", steps=6)).steps == 5
    assert read_calibration(write_calibration(tmp_path / "long", steps=50)).steps == 40


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("config.toml", "config.toml is missing"),
        ("metrics.jsonl", "tells of 0 training steps"),
        ("timeline.jsonl", "timeline.jsonl is missing"),
    ],
)
def test_a_folder_that_lacks_a_file(tmp_path: Path, broken: str, message: str) -> None:
    folder = write_calibration(tmp_path / "run")
    (folder / broken).unlink()
    with pytest.raises(ConfigError, match=message):
        read_calibration(folder)


def test_torn_files_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "run")
    for name in ("metrics.jsonl", "timeline.jsonl"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(0.8 * len(content))] + b"\n\xff\xfe\n")
    assert read_calibration(folder).costs.step_seconds == pytest.approx(STEP, rel=0.05)


def test_a_run_of_a_version_that_wrote_no_lengths(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["response_lengths"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="does not tell the lengths"):
        read_calibration(folder)


def test_a_replay_is_called_one(tmp_path: Path) -> None:
    """It generates nothing: no lengths, and no gservers."""
    folder = write_calibration(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["response_lengths"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timeline.jsonl").unlink()
    with pytest.raises(ConfigError, match="tells nothing of gserver processes, as in a replay"):
        read_calibration(folder)


def test_too_few_steps_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tells of 3 training steps, and"):
        read_calibration(write_calibration(tmp_path / "run", steps=3))
    with pytest.raises(ConfigError, match="no such folder"):
        read_calibration(tmp_path / "nothing")


def test_gservers_that_stood_still(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "run")
    timeline = folder / "timeline.jsonl"
    lines = [json.loads(line) for line in timeline.read_text().splitlines()]
    for line in lines:
        if line["role"] == "gserver":
            line["stats"] = {"tokens_generated_total": 5.0}
    timeline.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="made no tokens between two heartbeats"):
        read_calibration(folder)


def test_what_cannot_be_planned() -> None:
    synchronous = from_dict({"trainer": {"graph": "synchronous"}, "staleness": {"max_staleness": 0}})
    with pytest.raises(ConfigError, match="only the asynchronous graph"):
        check_plannable(synchronous, calibrated=True)
    joined = from_dict({"gserver": {"engine": "sglang", "sglang": {"addresses": ["http://127.0.0.1:1"]}}})
    with pytest.raises(ConfigError, match="--from"):
        check_plannable(joined, calibrated=False)
    check_plannable(joined, calibrated=True)


def test_a_short_run_that_fails_says_why(tmp_path: Path) -> None:
    config = from_dict({"model": {"path": str(tmp_path / "no-such-model")}})
    told: list[str] = []
    with pytest.raises(StreamRLError, match="no-such-model"):
        make_short_run(config, folder=tmp_path, tell=told.append)
    assert told


def test_a_short_run_is_made_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SIMULATED gservers, but otherwise as a user's: its processes are gone afterwards, and its costs are found."""
    monkeypatch.setattr(calibration, "ENOUGH_STEPS", 6)
    settings = {"gserver.engine": "simulated", "gserver.simulation.vocab_size": 12}
    settings["rollout.reward.function"] = "streamrl.rollout.tasks:hash_reward"
    config = load(EXAMPLE, [f"{key}={value}" for key, value in settings.items()])
    told: list[str] = []
    run_dir = make_short_run(config, folder=tmp_path, tell=told.append)
    found = read_calibration(run_dir)
    assert told[-1].startswith("a short run: ")
    assert found.steps >= 3  # on a busy machine no more than that in the time it may take
    assert processes_of(run_dir) == []
    assert not (run_dir / "checkpoints").exists()
    assert found.costs.train_token_seconds > 0
    assert found.costs.group_seconds > 0
    assert simulate(config, found.costs).steps_per_hour > 0


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0, 5), min_size=3, max_size=3),
    rows=st.lists(st.lists(st.floats(0.1, 100), min_size=3, max_size=3), min_size=4, max_size=20),
)
def test_fit_is_never_negative_and_no_worse_than_the_truth(weights: list[float], rows: list[list[float]]) -> None:
    terms = np.array(rows)
    sums = terms @ np.array(weights)
    found = np.array(fit(terms, sums))
    assert (found >= 0).all()
    assert np.abs(terms @ found - sums).max() <= 1e-6 * max(1.0, np.abs(sums).max())


def test_fit_with_noise_takes_the_best_that_is_not_negative() -> None:
    terms = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert fit(terms, np.array([3.0, 2.0, 1.0])) == pytest.approx((2.0, 0.0))
    assert fit(np.zeros((2, 2)), np.array([1.0, 2.0])) == (0.0, 0.0)
