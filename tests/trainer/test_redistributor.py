"""Plans: complete, pruned, exactly once, deterministic, balanced; dealing keeps its bounds."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import TransferError
from streamrl.trainer.redistributor import ArrayFacts, Transfer, concerning, deal, redistribute
from tests.trainer.transfers import Needs, needs


def plan_of(found: Needs) -> list[Transfer]:
    return redistribute(found.pieces, holders=found.holders, wanted=found.wanted)


def piece(seq, key="rewards", length=8):
    return ArrayFacts(seq, key, "float32", (length,))


def needs_of(*entries):
    """From (piece, holders, wanted)."""
    names = [(described.seq, described.key) for described, _, _ in entries]
    return Needs(
        [described for described, _, _ in entries],
        {name: set(having) for name, (_, having, _) in zip(names, entries, strict=True)},
        {name: set(wanting) for name, (_, _, wanting) in zip(names, entries, strict=True)},
    )


@given(needs())
def test_every_rank_gets_what_it_lacks_once_and_nothing_else(found):
    delivered = Counter()
    for transfer in plan_of(found):
        assert transfer.pieces
        assert transfer.destinations == sorted(set(transfer.destinations))
        assert transfer.source not in transfer.destinations
        for sent in transfer.pieces:
            assert transfer.source in found.holders[sent.seq, sent.key]
            delivered.update((sent, destination) for destination in transfer.destinations)
    lacking = Counter(
        (described, rank)
        for described in found.pieces
        for rank in found.wanted[described.seq, described.key] - found.holders[described.seq, described.key]
    )
    assert delivered == lacking


@given(needs())
def test_what_goes_the_same_way_goes_together_and_sources_take_turns(found):
    routes = [(source, tuple(destinations)) for source, destinations, _ in plan_of(found)]
    assert len(routes) == len(set(routes))
    several = [len(destinations) > 1 for _, destinations in routes]
    assert several == sorted(several), "what is sent to one rank alone comes first"
    sources = [source for source, destinations in routes if len(destinations) > 1]
    turns = [sources[:place].count(source) for place, source in enumerate(sources)]
    assert turns == sorted(turns)


@given(needs(), st.integers(0, 4))
def test_a_rank_sees_exactly_the_transfers_that_concern_it(found, rank):
    plan = plan_of(found)
    mine = concerning(plan, rank)
    assert [transfer for transfer in plan if transfer in mine] == mine
    for transfer in plan:
        assert (rank in (transfer.source, *transfer.destinations)) == (transfer in mine)


def test_plans_of_a_few_arrays():
    assert plan_of(needs_of((piece(0), [0], [0, 2, 1]), (piece(1), [0], [1, 2]))) == [
        Transfer(0, [1, 2], [piece(0), piece(1)])
    ]
    assert plan_of(needs_of((piece(0), [0], [2]), (piece(1), [1], [2]))) == [
        Transfer(0, [2], [piece(0)]),
        Transfer(1, [2], [piece(1)]),
    ]
    assert plan_of(needs_of((piece(0), [0], [1]), (piece(1), [0], [2]))) == [
        Transfer(0, [1], [piece(0)]),
        Transfer(0, [2], [piece(1)]),
    ]
    assert plan_of(needs_of((piece(0), [3], [3, 1]))) == [Transfer(3, [1], [piece(0)])]
    assert plan_of(needs_of((piece(0), [0, 1], [1]), (piece(1), [2], []))) == []


@pytest.mark.parametrize(
    ("pieces", "holders", "wanted", "message"),
    [
        ([piece(7)], {}, {(7, "rewards"): [1, 0]}, "seq 7 rewards is wanted by rank 0, 1 but no rank holds it"),
        ([], {(7, "rewards"): [0]}, {(7, "rewards"): [1]}, "seq 7 rewards is wanted but its dtype"),
        ([piece(7), piece(7, length=3)], {}, {}, "seq 7 rewards is described twice"),
        ([ArrayFacts(7, "x", "object", (3,))], {(7, "x"): [0]}, {(7, "x"): [1]}, "dtype 'object' do not travel"),
        ([ArrayFacts(7, "x", "no such", (3,))], {(7, "x"): [0]}, {(7, "x"): [1]}, "dtype 'no such' do not travel"),
    ],
)
def test_what_cannot_be_planned_is_named(pieces, holders, wanted, message):
    with pytest.raises(TransferError, match=message):
        redistribute(pieces, holders=holders, wanted=wanted)


costs = st.dictionaries(st.integers(0, 1000), st.integers(0, 5000), max_size=60)


def loads_of(dealt, cost):
    return [sum(cost[seq] for seq in seqs) for seqs in dealt]


@given(costs, st.integers(1, 6), st.none() | st.dictionaries(st.integers(0, 1000), st.integers(-1, 6)))
def test_a_deal_is_complete_ordered_balanced_and_repeatable(cost, ranks, home):
    dealt = deal(cost, ranks=ranks, home=home)
    assert len(dealt) == ranks
    assert sorted(seq for seqs in dealt for seq in seqs) == sorted(cost)
    assert all(seqs == sorted(seqs) for seqs in dealt)
    loads = loads_of(dealt, cost)
    assert max(loads) - min(loads) <= max(cost.values(), default=0)
    backwards = dict(reversed(cost.items()))
    assert deal(backwards, ranks=ranks, home=home and dict(reversed(home.items()))) == dealt


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=7),
    st.integers(2, 3),
    st.none() | st.dictionaries(st.integers(0, 6), st.integers(0, 2)),
)
def test_no_deal_is_worse_than_the_bound_of_longest_processing_time_first(cost_list, ranks, home):
    cost = dict(enumerate(cost_list))
    best = min(
        max(loads_of([[s for s in cost if owner[s] == rank] for rank in range(ranks)], cost))
        for owner in itertools.product(range(ranks), repeat=len(cost))
    )
    largest = max(loads_of(deal(cost, ranks=ranks, home=home), cost))
    assert largest <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9
