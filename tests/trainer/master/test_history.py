"""Where a run ends, against a ledger that hands out no more than the end needs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config, from_dict
from streamrl.ledger import Ledger, next_in_order
from streamrl.trainer.master.history import RunControl
from streamrl.types import SampleMeta
from tests.groups import make_group


def control(config: Config, *, rows: int = 10, step: int = 0, consumed: int = 0) -> RunControl:
    return RunControl(config, data_rows=rows, step=step, consumed=consumed, now=0.0)


def limits(**run: object) -> Config:
    return from_dict({"run": run})


def end(config: Config, *, step: int = 0, consumed: int = 0, rewards: tuple[float, ...] = (), rows: int = 10) -> str:
    return control(config, rows=rows).end(step=step, consumed=consumed, rewards=rewards) or ""


def test_whichever_limit_is_reached_first_ends_the_run() -> None:
    both = limits(total_train_epochs=2, total_train_steps=5)
    assert end(both, step=4, consumed=19) == ""
    assert end(both, step=4, consumed=20) == "2 epochs are done after 4 steps"
    assert end(both, step=5, consumed=19) == "5 steps are done"


def test_saves_and_evaluations_are_counted_apart() -> None:
    config = from_dict({"trainer": {"save_every": "2 steps"}, "evaluation": {"every": "1 epoch, 50s"}})
    counting = control(config, step=3, consumed=9)
    found = []
    for step in range(4, 9):
        position = {"step": step, "consumed": 3 * step, "now": 10.0 * step}
        found.append(counting.due(**position))
    evaluations, saves = zip(*found, strict=True)
    assert saves == (True, False, True, False, True)
    assert evaluations == (True, True, False, True, False)  # 12 groups, 50 s, -, 21 groups, -


@given(
    rows=st.integers(1, 12),
    epochs=st.integers(1, 3),
    batch=st.integers(1, 5),
    staleness=st.integers(0, 2),
    in_order=st.booleans(),
    refusal=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_a_run_of_epochs_always_ends_and_starts_nothing_that_it_does_not_need(
    rows: int, epochs: int, batch: int, staleness: int, in_order: bool, refusal: float, seed: int
) -> None:
    """Workers that finish in any order, give up some groups, and come again when there is room."""
    chance = random.Random(seed)
    ledger = Ledger(groups_per_batch=batch, max_staleness=staleness, lease_seconds=9.0)
    ledger.ends_after = rows * epochs
    counting = control(limits(total_train_epochs=epochs), rows=rows)
    running: list[int] = []
    held: set[int] = set()
    trained: set[int] = set()
    while True:
        consumed = len(trained) + len(ledger.rejected)
        if counting.end(step=ledger.policy_version, consumed=consumed, rewards=()) is not None:
            break
        wanted = (
            next_in_order((trained | {*ledger.rejected}).__contains__, start=0, count=batch)
            if in_order
            else sorted(held)[:batch]
        )
        if len(wanted) == batch and held.issuperset(wanted):
            trained.update(wanted)
            for seq in wanted:
                ledger.trained_on(seq)
            held.difference_update(wanted)
            ledger.advance(ledger.policy_version + 1)
            continue
        running += [group.seq for group in ledger.admit("rollout/0", chance.randint(1, 4), now=0.0)]
        assert running, "nobody works, and the run is not over"
        seq = running.pop(chance.randrange(len(running)))
        if chance.random() < refusal:
            ledger.reject(seq)
        else:
            ledger.accept(SampleMeta.of(make_group(seq), head=0))
            held.add(seq)
    assert len(trained) + len(ledger.rejected) >= rows * epochs
    assert ledger.next_seq < rows * epochs + batch


@pytest.mark.parametrize(
    ("run", "data", "steps"),
    [
        ({}, {}, 100),
        ({"total_train_steps": 7, "total_train_epochs": 1}, {"size": 1000}, 7),
        ({"total_train_epochs": 3}, {"size": 10}, 4),  # 30 groups in batches of 8
        ({"total_train_steps": 2, "total_train_epochs": 3}, {"source": "jsonl", "path": "x"}, 2),
    ],
)
def test_schedules_end_where_the_run_does(run: dict[str, int], data: dict[str, object], steps: int) -> None:
    assert from_dict({"run": run, "data": data}).planned_steps() == steps
