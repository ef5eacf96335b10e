"""The watch over a run's figures: made-up ones, and those of real runs that collapsed or did not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import Config, from_dict
from streamrl.records.collapse import CALM, CONTRAST_STEPS, WINDOW, CollapseWatch, Health, advice

HEALTHY = {
    "reward_mean": 0.97,
    "reward_std": 0.1,
    "groups": 32.0,
    "effective_sample_size": 0.995,
    "importance_ratio_deviation": 0.02,
    "grad_norm": 0.3,
}
MOVED = {"effective_sample_size": 0.2, "importance_ratio_deviation": 0.5}
FALLEN = {"reward_mean": 0.5}
BEGINNING = CollapseWatch()


def fed(steps: Iterable[dict[str, float]], watch: CollapseWatch = BEGINNING) -> list[CollapseWatch]:
    """The watch after each of `steps`, as the master feeds it."""
    found = [watch]
    for figures in steps:
        last = found[-1]
        ratio = {"grad_norm_ratio": last.grad_norm_ratio(figures["grad_norm"])} if "grad_norm" in figures else {}
        found.append(last.after(figures | ratio, step=len(found), turn=["trainer.lr=1"]))
    return found[1:]


def drifting(deviations: Sequence[float], *, age: float, most: float) -> list[CollapseWatch]:
    """The watch after each step of a run with `staleness.most_drift`, of data that are `age` versions old."""
    found = [CollapseWatch(near=0)]
    for step, deviation in enumerate(deviations):
        figures = HEALTHY | {"importance_ratio_deviation": deviation}
        found.append(found[-1].after(figures, step=step, turn=[], age=age, most_drift=most))
    return found


def states(watches: Iterable[CollapseWatch]) -> list[str]:
    return [watch.health.state for watch in watches]


@given(
    st.fixed_dictionaries(
        {
            "reward_mean": st.floats(-5, 5),
            "reward_std": st.floats(0, 5),
            "groups": st.integers(1, 1000).map(float),
            "effective_sample_size": st.floats(0.96, 1),
            "importance_ratio_deviation": st.floats(0, 0.03),
            "grad_norm": st.floats(0, 1e6),
        }
    ),
    st.integers(0, 150),
)
@settings(max_examples=60, deadline=None)
def test_constant_healthy_figures_are_no_alarm(figures, steps):
    assert set(states(fed([figures] * steps))) <= {"healthy"}


def test_a_reward_that_rises_from_nothing_is_no_alarm():
    """Gradients of the first steps are larger than later ones, and then smaller ones the rule."""
    rising = [HEALTHY | {"reward_mean": n / 100, "grad_norm": 5.0 / (1 + n / 10)} for n in range(100)]
    assert set(states(fed(rising))) == {"healthy"}


def test_the_policy_moving_away_is_a_warning_and_a_reward_that_falls_then_a_collapse():
    watches = fed([HEALTHY] * 30 + [HEALTHY | MOVED] * 8 + [HEALTHY | MOVED | FALLEN] * 8)
    found = states(watches)
    warned, collapsed = found.index("warning"), found.index("collapsing")
    assert 30 <= warned < 30 + WINDOW <= 38 <= collapsed < 38 + WINDOW
    health = watches[-1].health
    assert (health.since, health.turn) == (collapsed + 1, ["trainer.lr=1"])
    assert "effective sample size 0.20" in str(health)
    assert "reward fallen from 0.970 to 0.500" in str(health)


def test_a_reward_that_falls_alone_is_a_warning():
    assert states(fed([HEALTHY] * 30 + [HEALTHY | FALLEN] * 20))[-1] == "warning"


def test_noise_of_the_reward_is_no_fall():
    """Few groups whose rewards differ: means of five steps lie four standard errors of each other or nearer."""
    noisy = HEALTHY | {"reward_std": 0.5, "groups": 2.0}
    steps = [noisy | {"reward_mean": 0.5 + (0.25 if n // 10 % 2 else -0.25)} for n in range(100)]
    assert set(states(fed(steps))) == {"healthy"}


def test_large_gradients_alone_are_no_sign_and_are_told_beside_another():
    """Without staleness they come where few groups have contrast."""
    spikes = [HEALTHY] * 30 + [HEALTHY | {"grad_norm": 9.0}] * 10
    assert set(states(fed(spikes))) == {"healthy"}
    moved = fed([HEALTHY] * 30 + [HEALTHY | MOVED | {"grad_norm": 9.0}] * 3)[-1].health
    assert moved.state == "warning"
    assert moved.signs[-1] == "gradient norm up to 30 times the usual"


def test_a_single_step_far_from_its_data_is_no_sign():
    """One token can make it."""
    assert set(states(fed([HEALTHY] * 30 + [HEALTHY | MOVED] + [HEALTHY] * 10))) == {"healthy"}
    assert states(fed([HEALTHY] * 30 + [HEALTHY | MOVED] * 2))[-1] == "warning"


def test_a_policy_that_moves_far_while_its_reward_rises_learns():
    """Or because it always does, with its learning rate and this staleness."""
    far = HEALTHY | {"effective_sample_size": 0.7, "importance_ratio_deviation": 0.3}
    near = HEALTHY | {"effective_sample_size": 0.99, "importance_ratio_deviation": 0.03}
    rising = [(far if n > 60 else near) | {"reward_mean": n / 100} for n in range(80)]
    assert set(states(fed(rising))) == {"healthy"}
    assert states(fed([*rising, *[far | {"reward_mean": 0.8}] * 20]))[-1] == "warning"
    assert set(states(fed([far] * 100))) == {"healthy"}


def test_held_out_reward_that_fell_in_two_evaluations_is_a_sign():
    watch = fed([HEALTHY] * 30)[-1]
    for reward in (0.1, 0.9, 0.7):
        watch = watch.evaluated(reward)
    assert fed([HEALTHY], watch)[-1].health.state == "healthy"
    watch = fed([HEALTHY], watch.evaluated(0.6))[-1]
    assert watch.health.signs == ["held-out reward fallen from 0.900 to 0.700 in two evaluations"]


def test_a_run_is_healthy_again_after_so_many_steps_without_a_sign():
    watches = fed([HEALTHY] * 30 + [HEALTHY | MOVED] * 10 + [HEALTHY] * 30)
    found = states(watches)
    last_sign = max(n for n, watch in enumerate(watches) if watch.since_sign == 0)
    assert found[last_sign + CALM - 1 : last_sign + CALM + 1] == ["warning", "healthy"]
    assert found[-1] == "healthy"
    assert watches[-1].health.since == last_sign + CALM + 1


def test_figures_that_are_missing_or_no_numbers_are_left_out():
    holes = [{}, {"reward_mean": float("nan")}, {"grad_norm": float("inf")}, HEALTHY] * 20
    watches = fed(holes)
    assert set(states(watches)) == {"healthy"}
    assert len(watches[-1].recent["grad_norm"]) == 20
    msgspec.json.decode(msgspec.json.encode(watches[-1]), type=CollapseWatch)


any_steps = st.lists(
    st.sampled_from([HEALTHY, HEALTHY | MOVED, HEALTHY | FALLEN, HEALTHY | MOVED | FALLEN, HEALTHY | {"grad_norm": 9}]),
    max_size=60,
)


@given(any_steps, any_steps)
@settings(deadline=None)
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_been_interrupted(before, after):
    before = [HEALTHY] * 20 + before
    whole = fed(before + after)
    kept = msgspec.json.decode(msgspec.json.encode(whole[len(before) - 1]), type=CollapseWatch)
    assert kept == whole[len(before) - 1]
    if kept.health.state == "collapsing":
        assert kept.resumed().health.state == "warning"
    else:
        resumed = [kept.resumed()]
        for number, figures in enumerate(after, len(before) + 1):
            ratio = resumed[-1].grad_norm_ratio(figures["grad_norm"])
            found = resumed[-1].after(figures | {"grad_norm_ratio": ratio}, step=number, turn=["trainer.lr=1"])
            resumed.append(found)
        assert resumed[1:] == whole[len(before) :]


def test_advice_names_what_can_be_turned():
    told = advice(Config())
    assert told[0] == "staleness.max_staleness=2 (now 4)"
    assert told[1].startswith("trainer.lr=5e-06")
    synchronous = advice(from_dict({"staleness": {"max_staleness": 0}}))
    assert synchronous[0].startswith("trainer.lr=")
    for settings_ in (told, synchronous):
        for line in settings_:
            key, value = line.split(" ")[0].split("=")
            section, name = key.split(".")
            from_dict({section: {name: json.loads(value)}})  # an override that is taken


class Recorded(NamedTuple):
    """A real run of 170 steps, and what the watch says of it."""

    behavior_kl_coef: float
    max_staleness: int
    seed: int
    learned: int | None
    """First step at which three steps had a mean reward of 0.95."""
    fell: int | None
    """First one after it at which they had less than 0.9."""
    warned: list[int]
    """Steps at which an alarm began."""
    lowest: float | None
    """Reward of three steps after it was learned."""

    @classmethod
    def read(cls, trace: dict[str, Any]) -> Recorded:
        names = list(trace["figures"])
        rows = zip(*trace["figures"].values(), strict=True)
        steps = [dict(zip(names, row, strict=True)) | {"groups": trace["groups"]} for row in rows]
        found = ["healthy", *states(fed(steps))]
        rewards = [step["reward_mean"] for step in steps]
        means = {end: sum(rewards[end - 3 : end]) / 3 for end in range(3, len(rewards) + 1)}
        learned = next((step for step, mean in means.items() if mean >= 0.95), None)
        after = {step: mean for step, mean in means.items() if learned is not None and step > learned}
        return cls(
            trace["behavior_kl_coef"],
            trace["max_staleness"],
            trace["seed"],
            learned,
            next((step for step, mean in after.items() if mean < 0.9), None),
            [step for step in range(1, len(found)) if found[step] != "healthy" and found[step - 1] == "healthy"],
            min(after.values(), default=None),
        )

    @property
    def lead(self) -> int | None:
        """Steps from the first alarm to the fall of the reward."""
        early = [step for step in self.warned if self.fell is not None and step <= self.fell]
        return self.fell - early[0] if self.fell is not None and early else None

    def row(self) -> str:
        """In the table of docs/collapse.md."""
        cells: list[object] = [f"{self.behavior_kl_coef:g}", self.max_staleness, self.seed, self.learned, self.fell]
        cells += [None if self.lowest is None else f"{self.lowest:.2f}", ", ".join(map(str, self.warned)), self.lead]
        return "| " + " | ".join("–" if cell in (None, "") else str(cell) for cell in cells) + " |"


RECORDED = [Recorded.read(trace) for trace in json.loads((Path(__file__).parent / "collapse_traces.json").read_text())]


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: "-".join(map(str, run[:3])))
def test_recorded_runs_are_warned_of_before_their_reward_falls_and_healthy_ones_are_not(run):
    """One never had a reward of 0.95; it is in the table of the docs."""
    if run.fell is not None:
        assert run.lead is not None
        assert run.lead >= 2
    elif run.learned is not None:
        assert run.warned == []


def test_the_table_of_the_page_is_what_the_watch_makes_of_the_recorded_runs():
    page = (Path(__file__).parents[2] / "docs" / "collapse.md").read_text()
    rows = page.partition("| `behavior_kl_coef` | η | seed |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows == [run.row() for run in RECORDED]


def test_staleness_rises_while_the_policy_is_near_and_falls_when_it_moves() -> None:
    calm = drifting([0.02] * 10, age=2.0, most=0.1)
    assert [watch.staleness(8) for watch in calm] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
    assert calm[-1].staleness(3) == 3, "max_staleness is the most"
    moved = drifting([0.02] * 10 + [0.4, 0.4, 0.02, 0.02, 0.02], age=2.0, most=0.1)
    assert [watch.staleness(8) for watch in moved[10:]] == [8, 1, 1, 1, 2, 3]
    assert moved[-1].drift == pytest.approx(0.03, abs=0.01)


def test_a_difference_of_the_engine_is_no_drift() -> None:
    """Tokens of age 0 show how far ρ is from 1 without any."""
    apart = {"importance_ratio_deviation": 0.3, "importance_ratio_deviation/age_0": 0.3}
    watch = BEGINNING.after(apart, step=1, turn=[], age=0.0, most_drift=0.1)
    for step in range(2, 10):
        watch = watch.after({"importance_ratio_deviation": 0.32}, step=step, turn=[], age=2.0, most_drift=0.1)
    assert watch.drift == pytest.approx(0.01)
    assert watch.staleness(8) == 8


@given(st.lists(st.floats(0, 5), max_size=60), st.floats(0.01, 8), st.floats(0.001, 1), st.integers(0, 16))
def test_staleness_rises_by_one_version_a_step(deviations: list[float], age: float, most: float, eta: int) -> None:
    found = [watch.staleness(eta) for watch in drifting(deviations, age=age, most=most)]
    assert found[0] == 0
    assert all(0 <= now <= min(eta, before + 1) for before, now in pairwise(found))
    assert all(now >= min(eta, 1) for now in found[1:])


def test_a_resumed_run_keeps_its_drift_and_one_without_the_limit_has_no_more() -> None:
    watch = msgspec.json.decode(msgspec.json.encode(drifting([0.1] * 9, age=2.0, most=0.2)[-1]), type=CollapseWatch)
    assert watch.resumed(most_drift=0.2).staleness(8) == watch.staleness(8) == 4
    assert watch.resumed().staleness(8) == 8
    assert BEGINNING.resumed(most_drift=0.2).staleness(8) == 0


@given(st.lists(st.integers(0, 32), max_size=60), st.integers(0, 32))
@settings(deadline=None)
def test_steps_shrink_by_the_root_of_the_share_of_groups_that_teach(counts, now):
    watch = fed([HEALTHY | {"groups_with_contrast": float(count)} for count in counts] or [HEALTHY])[-1]
    means = [
        sum(counts[max(0, end - CONTRAST_STEPS) : end]) / min(end, CONTRAST_STEPS)
        for end in range(WINDOW, len(counts) + 1)
    ]
    most = max(means, default=0.0)
    expected = min(1.0, math.sqrt(max(now, 1) / most)) if most else 1.0
    assert watch.lr_scale(now, 32) == pytest.approx(expected)


def test_the_usual_share_of_groups_that_teach_survives_a_checkpoint_and_other_sizes_of_a_batch() -> None:
    watch = fed([HEALTHY | {"groups_with_contrast": 16.0}] * WINDOW)[-1]
    read = msgspec.json.decode(msgspec.json.encode(watch), type=CollapseWatch)
    assert read.lr_scale(1, 8) == read.resumed().lr_scale(1, 8) == 0.5
    collapsed = msgspec.structs.replace(read, health=Health(state="collapsing")).resumed()
    assert collapsed.lr_scale(1, 8) == 0.5, "also after its figures have been forgotten"
    assert fed([HEALTHY | {"groups": 8.0, "groups_with_contrast": 1.0}], read)[-1].lr_scale(1, 8) == 0.5
