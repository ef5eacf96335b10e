"""The simulation against cases that can be worked out by hand, and what holds whatever the settings are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import Config, from_dict
from streamrl.planner.simulation import GENERATING, NO_BATCH, NO_ROOM, TRAINING, Costs, Prediction, simulate


def settings_of(
    *, eta: int = 0, over_age: str = "mask", batch: int = 1, siblings: int = 1, slots: int = 1, **more: dict[str, Any]
) -> Config:
    tree: dict[str, Any] = {
        "staleness": {"max_staleness": eta, "over_age": over_age},
        "trainer": {"batch_groups": batch},
        "rollout": {"group_size": siblings},
        "gserver": {"max_running": slots},
        "algorithm": {"advantage": "reinforce++"},  # which needs no siblings
    }
    for section, entries in more.items():
        tree[section] = {**tree.get(section, {}), **entries}
    return from_dict(tree)


def costs_of(*, lengths: list[list[int]] | None = None, step: float = 1.0, train: float = 5.0, **more: Any) -> Costs:
    """Where nothing costs anything but decode steps and training steps."""
    given: dict[str, Any] = {
        "response_lengths": lengths or [[11]],
        "prompt_tokens": 0.0,
        "step_seconds": step,
        "request_seconds": 0.0,
        "train_seconds": train,
        "train_token_seconds": 0.0,
    }
    return Costs(**(given | more))


def period(found: Prediction) -> float:
    """Seconds of a training step."""
    return 3600 / found.steps_per_hour


def test_a_synchronous_run_takes_what_its_parts_take() -> None:
    """A response of 11 tokens is 10 decode steps: the prompt gives the first token."""
    found = simulate(settings_of(), costs_of())
    assert period(found) == pytest.approx(10 + 5)
    assert found.trainer[TRAINING] == pytest.approx(5 / 15)
    assert found.trainer[NO_BATCH] == pytest.approx(10 / 15)
    assert found.gservers[GENERATING] == pytest.approx(10 / 15)
    assert found.gservers[NO_ROOM] == pytest.approx(5 / 15)
    assert found.token_ages == {0: 1.0}
    assert found.tokens_trained_per_second == pytest.approx(11 / 15)


@pytest.mark.parametrize(("train", "expected"), [(5.0, 10.0), (25.0, 25.0)])
def test_pools_that_overlap_take_what_the_slower_one_takes(train: float, expected: float) -> None:
    found = simulate(settings_of(eta=2), costs_of(train=train))
    assert period(found) == pytest.approx(expected)


def test_a_shared_core_is_shared() -> None:
    """One core has to do both: 10 s of decoding and 5 s of training for each step, however they overlap."""
    costs = costs_of(cores=1, gservers_on_cores=True, trainer_on_cores=True)
    found = simulate(settings_of(eta=3), costs)
    assert period(found) == pytest.approx(15, rel=0.02)
    assert found.cores_busy == pytest.approx(1.0, rel=0.01)
    two = simulate(settings_of(eta=3), msgspec.structs.replace(costs, cores=2))
    assert period(two) == pytest.approx(10, rel=0.02)
    assert two.cores_busy == pytest.approx(15 / 20, rel=0.02)


@pytest.mark.parametrize(
    ("rollout", "length"),
    [({}, 11), ({"workflow": {"name": "multi_turn"}}, 31), ({"agent": {"function": "somewhere:agent"}}, 31)],
    ids=["single_turn", "multi_turn", "agent"],
)
def test_most_new_tokens_are_those_of_a_turn(rollout: dict[str, Any], length: int) -> None:
    config = settings_of(rollout={"sampling": {"max_new_tokens": 11}, **rollout})
    assert period(simulate(config, costs_of(lengths=[[31]], train=4.0))) == pytest.approx(length - 1 + 4)


def test_gservers_share_the_groups_by_the_real_routing() -> None:
    """Two for each of four, of which the second comes a step after the first."""
    config = settings_of(batch=8, slots=2, gserver={"count": 4})
    found = simulate(config, costs_of(train=1.0))
    assert period(found) == pytest.approx(11 + 1)
    assert found.slots_used == pytest.approx(10 / 12)


def test_a_response_is_of_the_versions_under_which_it_grew() -> None:
    """A step takes 4, a response 40: when it is trained on, a tenth of its tokens is of each of the versions."""
    config = settings_of(eta=16, batch=4, slots=40)
    found = simulate(config, costs_of(lengths=[[41]], train=4.0))
    assert found.mean_token_age > 4
    assert len(found.token_ages) >= 9


def test_pausing_by_abort_costs_what_was_computed() -> None:
    costs = costs_of(lengths=[[101]], train=7.0, prompt_tokens=50.0, prompt_token_seconds=0.05)
    kept = simulate(settings_of(eta=8, batch=2, slots=8), costs)
    lost = simulate(settings_of(eta=8, batch=2, slots=8, weights={"pause_mode": "abort"}), costs)
    assert period(lost) > 1.1 * period(kept)


TAIL = [[5, 9], [7, 30], [4, 6], [11, 150], [8, 12], [3, 20]]


def test_policies_for_old_tokens() -> None:
    costs = costs_of(lengths=TAIL, train=3.0)
    found = {
        policy: simulate(settings_of(eta=2, over_age=policy, batch=4, siblings=2, slots=16), costs, steps=120)
        for policy in ("mask", "wait", "drop")
    }
    assert found["mask"].masked_share > 0
    assert found["mask"].dropped_share == 0
    assert found["wait"].masked_share == found["wait"].dropped_share == 0
    assert found["drop"].dropped_share > 0
    assert found["drop"].masked_share == 0
    assert found["wait"].steps_per_hour < found["mask"].steps_per_hour


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.fixed_dictionaries(
        {
            "eta": st.integers(0, 5),
            "over_age": st.sampled_from(["mask", "wait", "drop"]),
            "batch": st.integers(1, 6),
            "siblings": st.integers(1, 3),
            "slots": st.integers(1, 9),
            "gserver": st.fixed_dictionaries({"count": st.integers(1, 3)}),
            "rollout": st.fixed_dictionaries({"workers": st.integers(1, 2)}),
        }
    ),
    spent=st.fixed_dictionaries(
        {
            "lengths": st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), min_size=1, max_size=8),
            "train": st.floats(0.01, 40.0),
            "request_seconds": st.floats(0.0, 0.5),
            "publish_seconds": st.floats(0.0, 3.0),
            "cores": st.sampled_from([None, 1, 2, 4]),
        }
    ),
    seed=st.integers(0, 5),
)
def test_whatever_the_settings(chosen: dict[str, Any], spent: dict[str, Any], seed: int) -> None:
    eta, slots, gservers = chosen["eta"], chosen["slots"], chosen["gserver"]["count"]
    on_cores = spent["cores"] is not None
    costs = costs_of(
        **spent,
        pause_seconds=0.1,
        group_seconds=0.05,
        prompt_tokens=4.0,
        prompt_token_seconds=0.01,
        gservers_on_cores=on_cores,
        trainer_on_cores=on_cores,
    )
    config = settings_of(**chosen)
    found = simulate(config, costs, steps=12, seed=seed)
    assert found == simulate(config, costs, steps=12, seed=seed)
    if found.token_ages:
        assert sum(found.token_ages.values()) == pytest.approx(1)
        assert min(found.token_ages) >= 0
        assert max(found.token_ages) <= eta
    assert sum(found.trainer.values()) == pytest.approx(1)
    assert sum(found.gservers.values()) == pytest.approx(1)
    assert 0 <= found.slots_used <= 1 + 1e-9
    assert found.masked_share == 0 or chosen["over_age"] == "mask"
    assert found.dropped_share == 0 or chosen["over_age"] == "drop"
    # an ideal pipeline: the trainer never waits, and neither does a core
    assert period(found) >= spent["train"] - 1e-6
    if on_cores:
        assert found.cores_busy is not None
        assert found.cores_busy <= 1 + 1e-9
    shortest = min(max(1, length - 1) for group in spent["lengths"] for length in group)
    ideal = gservers * slots / (1 + spent["request_seconds"] * slots) / (chosen["siblings"] * shortest)
    begun = (eta + 1) * chosen["batch"] / found.seconds  # that were under way when counting began
    assert found.groups_per_second <= ideal + begun


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_no_slower_than_list_scheduling_may_be(eta: int) -> None:
    """Whoever gives the next request to the slot that is free first is done with Q requests on K slots in less than
    their mean length times Q / K, and the longest of them (Graham 1969). Staleness spreads that one over more steps.
    """
    lengths = [[5, 9], [7, 30], [4, 6], [11, 90], [8, 12], [3, 20]]
    config = settings_of(eta=eta, batch=24, siblings=2, slots=6, gserver={"count": 2})
    found = simulate(config, costs_of(lengths=lengths, train=0.001), steps=60)
    steps = [length - 1 for group in lengths for length in group]
    mean = sum(steps) / len(steps) * 24 * 2 / 12
    assert mean * 0.9 <= period(found) <= 1.1 * (mean + max(steps) / (eta + 1)) + 2


def test_a_thousand_gservers_are_a_few_events_for_each_response() -> None:
    """Decode steps in which nothing happens are no events, nor is what happens on other gservers."""
    config = settings_of(eta=1, batch=500, siblings=4, slots=8, gserver={"count": 1000}, rollout={"workers": 20})
    costs = costs_of(lengths=[[200, 400, 800, 1600]], train=100.0, group_seconds=0.001)
    found = simulate(config, costs, steps=3, warm_up=1)
    responses = 4 * 500 * (4 + 1)
    assert found.events < 8 * responses
    assert found.groups_per_second == pytest.approx(500 / period(found), rel=0.01)
