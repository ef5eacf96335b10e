"""What is read from the folder of a run, and what is said of folders that do not tell enough."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import from_dict, load
from streamrl.errors import ConfigError
from streamrl.planner import calibration
from streamrl.planner.calibration import check_plannable, fit, make_short_run, read_calibration
from streamrl.planner.simulation import simulate
from tests.e2e.harness import COPY_SCRATCH as EXAMPLE
from tests.e2e.harness import processes_of
from tests.planner.runs import CONTROL, GROUP, LENGTHS, OTHERS, PROMPT, REQUEST, REWARD, STEP, USED, write_calibration


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


def test_a_run_on_devices_of_its_own_is_timed_by_the_clock(tmp_path: Path) -> None:
    costs = read_calibration(write_calibration(tmp_path / "run", run={"device": "cuda"}), cores=2).costs
    assert not costs.gservers_on_cores
    assert not costs.trainer_on_cores
    assert costs.step_seconds == pytest.approx(1.1 * STEP, rel=0.01)
    assert costs.train_seconds == pytest.approx(0.3)
    assert costs.train_token_seconds == pytest.approx(1.1 / 360)
    assert costs.publish_seconds == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("config.toml", "config.toml is missing"),
        ("metrics.jsonl", "has 0 training steps"),
        ("timeline.jsonl", "timeline.jsonl is missing"),
    ],
)
def test_a_folder_that_lacks_a_file(tmp_path: Path, broken: str, message: str) -> None:
    folder = write_calibration(tmp_path / "run")
    (folder / broken).unlink()
    with pytest.raises(ConfigError, match=message):
        read_calibration(folder)


def test_what_cannot_be_planned() -> None:
    synchronous = from_dict({"trainer": {"graph": "synchronous"}, "staleness": {"max_staleness": 0}})
    with pytest.raises(ConfigError, match="only the asynchronous graph"):
        check_plannable(synchronous, calibrated=True)
    joined = from_dict({"gserver": {"engine": "sglang", "sglang": {"addresses": ["http://127.0.0.1:1"]}}})
    with pytest.raises(ConfigError, match="--from"):
        check_plannable(joined, calibrated=False)
    check_plannable(joined, calibrated=True)


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
