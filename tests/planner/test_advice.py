"""What is recommended, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from streamrl.config import from_dict
from streamrl.errors import ConfigError
from streamrl.planner import advice
from streamrl.planner.advice import MARGIN, Option, Plan, alternatives, as_json, choose, make_plan, shown, with_settings
from streamrl.planner.calibration import Calibration, read_calibration
from streamrl.planner.simulation import Costs, Prediction, simulate
from tests.planner.runs import write_calibration

BASE: dict[str, Any] = {
    "rollout": {"group_size": 2},
    "trainer": {"batch_groups": 4},
    "gserver": {"max_running": 16},
    "staleness": {"max_staleness": 0},
}


def calibration(**costs: Any) -> Calibration:
    given: dict[str, Any] = {
        "response_lengths": [[10, 20], [30, 60], [5, 15], [20, 40]],
        "prompt_tokens": 10.0,
        "step_seconds": 0.01,
        "request_seconds": 0.001,
        "train_seconds": 0.1,
        "train_token_seconds": 0.002,
    }
    return Calibration(costs=Costs(**(given | costs)), of="a test", steps=10, seconds=20.0)


def option(settings: advice.Settings, *, tokens: float, age: float = 0.0, masked: float = 0.0) -> Option:
    prediction = Prediction(
        steps_per_hour=1.0,
        tokens_trained_per_second=tokens,
        tokens_generated_per_second=tokens,
        groups_per_second=1.0,
        trainer={},
        gservers={},
        slots_used=0.5,
        cores_busy=None,
        token_ages={0: 1.0},
        mean_token_age=age,
        masked_share=masked,
        dropped_share=0.0,
        mean_group_seconds=1.0,
        seconds=1.0,
        events=1,
    )
    return Option(settings, prediction)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(from_dict(BASE), calibration())


def test_a_synchronous_run_is_told_to_overlap(plan: Plan) -> None:
    assert plan.present.settings == {}
    assert plan.recommended.settings["staleness.max_staleness"] != 0
    assert plan.recommended.tokens > 1.2 * plan.present.tokens
    assert "wait for each other" in plan.reasons[0]
    assert any(reason.startswith("staleness.max_staleness=") for reason in plan.reasons)
    assert [option.tokens for option in plan.others] == sorted((o.tokens for o in plan.others), reverse=True)


def test_what_is_to_change_is_what_was_played(plan: Plan) -> None:
    changed = with_settings(from_dict(BASE), plan.recommended.settings)
    assert simulate(changed, plan.calibration.costs, steps=advice.STEPS) == plan.recommended.prediction
    assert plan.change == [f"{key}={value}" for key, value in plan.recommended.settings.items()]


def test_no_faster_option_was_passed_over_but_for_fresher_tokens(plan: Plan) -> None:
    for other in plan.others:
        if "trainer.batch_groups" in other.settings or other.settings.get("staleness.over_age") == "drop":
            continue
        assert other.tokens * (1 - MARGIN) <= plan.recommended.tokens or other.prediction.masked_share > 0.1


def test_settings_that_are_good_stay() -> None:
    good = from_dict(BASE | {"staleness": {"max_staleness": 1}})
    found = make_plan(good, calibration(train_seconds=10.0))
    assert found.recommended.settings.get("staleness.max_staleness", 1) <= 1
    assert found.recommended.tokens >= (1 - MARGIN) * found.present.tokens


def test_the_freshest_of_the_fastest_is_chosen() -> None:
    present = option({}, tokens=50.0)
    fast = option({"staleness.max_staleness": 8}, tokens=100.0, age=7.0)
    fresh = option({"staleness.max_staleness": 2}, tokens=98.0, age=2.0)
    slow = option({"staleness.max_staleness": 1}, tokens=80.0, age=1.0)
    assert choose(present, [present, fast, fresh, slow]) is fresh


def learner(*, learned_age: float) -> Any:
    """A player: the present settings of a policy that has learned have this mean age, all others none."""

    class Player:
        def play_learned(self, settings: advice.Settings) -> Prediction:
            return option({}, tokens=1.0, age=0.0 if settings else learned_age).prediction

    return Player()


@pytest.mark.parametrize(
    ("tokens", "age", "learned_age", "worth"),
    [
        (106.0, 4.0, 4.0, True),
        (104.0, 3.5, 4.0, False),
        (100.0, 1.0, 4.0, True),
        (100.0, 1.0, 0.9, False),  # what it gains is gone when the policy has learned
    ],
)
def test_a_change_is_worth_it_from_a_threshold_on(tokens: float, age: float, learned_age: float, worth: bool) -> None:
    present = option({}, tokens=100.0, age=4.0)
    changed = option({"staleness.max_staleness": 1}, tokens=tokens, age=age)
    assert advice._is_worth_it(changed, present, learner(learned_age=learned_age)) == worth


def test_a_plan_without_a_change_says_so_and_how_its_forecast_ages() -> None:
    """Training is the limit, so tokens grow old; a policy that has learned trains faster, and they are fresh."""
    config = from_dict(BASE | {"staleness": {"max_staleness": 4}})
    costs = calibration(train_seconds=0.1, train_token_seconds=0.002, publish_seconds=0.0)
    found = make_plan(config, costs)
    assert found.present.prediction.mean_token_age > found.learned.mean_token_age + 1
    assert found.change == []
    assert found.recommended is found.present
    text = " ".join(found.reasons)
    assert "No change is worth it: of " in text
    waits = found.learned.trainer["waits for groups"]
    assert f"waits for groups {waits:.0%}, and the mean age is {found.learned.mean_token_age:.1f} versions" in text


def test_other_batches_drops_and_masked_tokens_are_not_recommended() -> None:
    present = option({}, tokens=50.0)
    batch = option({"trainer.batch_groups": 16}, tokens=100.0)
    drop = option({"staleness.over_age": "drop"}, tokens=100.0)
    masked = option({"staleness.max_staleness": 1}, tokens=100.0, masked=0.3)
    assert choose(present, [present, batch, drop, masked]) is present


def test_alternatives_are_of_the_machine() -> None:
    config = from_dict(BASE | {"gserver": {"count": 3, "max_running": 8}})
    on_devices = list(alternatives(config, calibration()))
    assert {"gserver.count": 2, "trainer.data_parallel": 2} in on_devices
    assert not any("gserver.threads" in changed for changed in on_devices)
    cores = calibration(cores=2.0, gservers_on_cores=True, trainer_on_cores=True)
    on_cores = list(alternatives(config, cores))
    assert {"trainer.threads": 2} in on_cores
    assert {"gserver.threads": 2} in on_cores
    assert not any("trainer.data_parallel" in changed for changed in on_cores)


def test_other_divisions_have_as_many_devices() -> None:
    config = from_dict(
        BASE
        | {
            "gserver": {"engine": "sglang", "count": 3, "sglang": {"tensor_parallel": 2}},
            "trainer": {"backend": "megatron", "data_parallel": 2, "tensor_parallel": 4, "batch_groups": 4},
        }
    )
    divisions = [changed for changed in alternatives(config, calibration()) if advice.RANKS in changed]
    assert divisions == [
        {"gserver.count": 1, "trainer.data_parallel": 3},
        {"gserver.count": 5, "trainer.data_parallel": 1},
    ]


def test_settings_that_are_not_allowed() -> None:
    with pytest.raises(ConfigError, match="max_staleness"):
        with_settings(from_dict(BASE), {"staleness.max_staleness": -1})


def test_very_large_runs_get_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def events() -> int:
        found = make_plan(from_dict(BASE), calibration())
        (longer,) = (other for other in found.others if other.settings == {"gserver.max_running": 64})
        return longer.prediction.events

    before = events()
    monkeypatch.setattr(advice, "EVENTS", 10)
    assert events() < before / 2


def test_what_people_and_programs_are_told(plan: Plan) -> None:
    console = Console(width=80)
    with console.capture() as told:
        console.print(shown(plan))
    text = told.get()
    for part in ("recommended:", "present", "steps/h", "calibrated from a test: 10 steps in 20 s", *plan.change):
        assert part in text, part
    tree = json.loads(as_json(plan))
    assert tree["recommended"]["settings"] == plan.recommended.settings
    assert "response_lengths" not in tree["calibration"]["costs"]
    assert msgspec.convert(tree["present"]["prediction"], Prediction, strict=False) == plan.present.prediction


def test_the_table_fits_into_80_columns(plan: Plan) -> None:
    figures = {"steps_per_hour": 5004.0, "tokens_trained_per_second": 3724.0, "tokens_generated_per_second": 3725.0}
    ages = {"token_ages": {16: 1.0}, "mean_token_age": 16.0}
    prediction = msgspec.structs.replace(plan.present.prediction, **figures, **ages)
    wide = msgspec.structs.replace(plan, present=msgspec.structs.replace(plan.present, prediction=prediction))
    console = Console(width=80)
    with console.capture() as told:
        console.print(shown(wide))
    lines = told.get().splitlines()
    heading = next(line for line in lines if "steps/h" in line)
    row = next(line for line in lines if line.split()[:1] == ["present"])
    assert (heading.split()[-1], row.split()[4], row.rstrip()[-1]) == ("makes", "16.0≤16", "%")


def test_a_plan_from_the_folder_of_a_run(tmp_path: Path) -> None:
    folder = write_calibration(tmp_path / "run")
    found = make_plan(from_dict(BASE), read_calibration(folder, cores=2))
    assert found.present.prediction.cores_busy is not None
    assert any("cores" in note for note in found.calibration.notes)


def test_an_earlier_run_of_the_configuration_is_pointed_to(tmp_path: Path) -> None:
    config = from_dict(BASE | {"run": {"dir": str(tmp_path), "name": "run"}})
    assert advice._earlier_runs(config) == []
    for name, steps in (("run", 9), ("run-2", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("{}\n" * steps)
    (note,) = advice._earlier_runs(config)
    assert note.startswith(f"--from {tmp_path}/run plans from the costs of that run")
