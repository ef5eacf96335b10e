"""Rows that a sampler chooses: kept across rewinds and resumed runs, each result counted once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.hooks.sampler import near_half
from streamrl.errors import ConfigError
from streamrl.ledger import Ledger
from streamrl.records.lineage import Lineage
from streamrl.rows import RowResult, RowResults, RowsState, try_sampler
from streamrl.types import SampleMeta
from tests.groups import make_group

HERE = "tests.test_rows"


def new_ledger() -> Ledger:
    return Ledger(groups_per_batch=4, max_staleness=2, lease_seconds=1e9)


def checkpoint(ledger: Ledger) -> bytes:
    return msgspec.json.encode((list(ledger.trained_seqs), list(ledger.rejected), ledger.rows.state()))


@settings(max_examples=200)
@given(data=st.data())
def test_open_groups_keep_their_rows_and_each_result_counts_once(data: st.DataObject) -> None:
    ledger, saved = new_ledger(), checkpoint(new_ledger())
    failed: set[int] = set()
    moves = st.sampled_from(["choose", "admit", "train", "reject", "fail", "drop", "save", "rewind", "resume"])
    for move in data.draw(st.lists(moves, max_size=40)):
        running = [seq for seq, group in ledger.groups.items() if group.state == "leased"]
        seq = data.draw(st.sampled_from(running)) if running else None
        match move:
            case "choose":
                for each in ledger.next_to_admit(4):
                    ledger.rows.chosen.setdefault(each, data.draw(st.integers(0, 9)))
            case "admit":
                count = next((n for n, s in enumerate(ledger.next_to_admit(9)) if s not in ledger.rows.chosen), 9)
                assert all(group.seq in ledger.rows.chosen for group in ledger.admit("rollout/0", count, now=0.0))
            case "train" | "drop" if seq is not None:
                assert ledger.accept(SampleMeta.of(make_group(seq), head=0)) is not None
                if move == "train":
                    ledger.trained_on(seq)
                else:
                    ledger.discarding(seq)
                    ledger.discarded(seq)
            case "reject" if seq is not None:
                ledger.reject(seq, reward=0.5)
            case "fail" if seq is not None:
                ledger.reject(seq)
                failed.add(seq)
            case "save":
                saved = checkpoint(ledger)
            case "rewind" | "resume":
                ledger = new_ledger() if move == "resume" else ledger
                trained, rejected, rows = msgspec.json.decode(saved, type=tuple[list[int], list[int], RowsState])
                ledger.restore(Lineage(policy_version=len(trained) // 4), trained=trained, rejected=rejected, rows=rows)
                assert rows.chosen.items() <= ledger.rows.chosen.items()
                assert checkpoint(ledger) == saved or move == "rewind"
        assert all(not ledger.is_closed(each) for each in ledger.rows.chosen)
        failed &= set(ledger.rejected)
        closed = len(ledger.trained_seqs) + len(ledger.rejected) - len(failed)
        assert sum(result.groups for own in ledger.rows.results.values() for result in own.values()) == closed


def test_the_example_prefers_rows_that_are_solved_half_of_the_time() -> None:
    results = RowResults.of(
        4, {0: RowResult(2, 2.0, 1.0), 1: RowResult(1, 0.5, 0.5), 2: RowResult(1, 0.0, 0.0)}, {3: 1}
    )
    assert np.nan_to_num(results.rewards, nan=-1).tolist() == [1.0, 0.5, 0.0, -1.0]
    assert (results.groups.tolist(), results.under_way.tolist()) == ([2, 1, 1, 0], [0, 0, 0, 1])
    counts = np.bincount(near_half(results, 4000, np.random.default_rng(0)), minlength=4)
    assert counts.min() > 0
    assert counts[[1, 3]].min() > 5 * counts[[0, 2]].max()
    try_sampler("examples.hooks.sampler:near_half", {"explore": 0.2})


def too_few(results: RowResults, count: int, random: np.random.Generator) -> Sequence[int]:
    return [0]


def outside(results: RowResults, count: int, random: np.random.Generator) -> Sequence[int]:
    return [len(results.groups)] * count


@pytest.mark.parametrize("name", ["too_few", "outside"])
def test_wrong_rows_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="return 4 rows, each from 0 to 15"):
        try_sampler(f"{HERE}:{name}", {})


def test_arguments_that_a_sampler_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.sampler_args\.exploer"):
        try_sampler("examples.hooks.sampler:near_half", {"exploer": 0.2})
