"""What is recommended, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from streamrl.config import from_dict
from streamrl.planner import advice
from streamrl.planner.advice import MARGIN, Option, Plan, alternatives, as_json, make_plan, shown
from streamrl.planner.calibration import Calibration, read_calibration
from streamrl.planner.simulation import Costs, Prediction
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


def option(settings: advice.Settings, *, tokens: float, age: float = 0.0) -> Option:
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
        masked_share=0.0,
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
    assert [option.learning for option in plan.others] == sorted((o.learning for o in plan.others), reverse=True)


def test_speed_does_not_outweigh_any_age() -> None:
    present = option({}, tokens=100.0, age=0.0)
    stale = option({"staleness.max_staleness": 32}, tokens=115.0, age=20.0)
    assert advice.choose(present, [present, stale]) is present
    assert stale.learning == pytest.approx(115.0 * (1 - 20 * advice.AGE_COST))


def test_no_better_option_was_passed_over_but_for_fresher_tokens(plan: Plan) -> None:
    for other in plan.others:
        if "trainer.batch_groups" in other.settings or other.settings.get("staleness.over_age") == "drop":
            continue
        assert other.learning * (1 - MARGIN) <= plan.recommended.learning or other.prediction.masked_share > 0.1


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
        (100.0, 1.5, 4.0, True),
        (100.0, 1.5, 0.9, False),  # what it gains is gone when the policy has learned
    ],
)
def test_a_change_is_worth_it_from_a_threshold_on(tokens: float, age: float, learned_age: float, worth: bool) -> None:
    present = option({}, tokens=100.0, age=4.0)
    changed = option({"staleness.max_staleness": 1}, tokens=tokens, age=age)
    assert advice._is_worth_it(changed, present, learner(learned_age=learned_age)) == worth


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
