"""Layouts: every rank stands in one place, and data-parallel ranks are apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.trainer.layout import Layout

LAYOUTS = st.builds(Layout, **dict.fromkeys(("data", "context", "tensor", "pipeline"), st.integers(1, 3)))


@given(LAYOUTS)
def test_ranks_and_coordinates_are_one_to_one(layout):
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert layout.rank(**at._asdict()) == rank
        assert at.data < layout.data
        assert at.context < layout.context
        assert at.tensor < layout.tensor
        assert at.pipeline < layout.pipeline


@given(LAYOUTS)
def test_members_divide_the_ranks_and_each_has_its_head(layout):
    members = [layout.members(data) for data in range(layout.data)]
    assert sorted(rank for group in members for rank in group) == list(range(layout.world))
    for data, head in enumerate(layout.heads):
        assert head in members[data]
        assert layout.coordinates(head) == (data, 0, 0, layout.pipeline - 1)
    assert layout.heads == sorted(layout.heads)


def test_experts_are_spread_within_each_stage():
    layout = Layout(data=2, tensor=2, pipeline=2, expert=2)
    assert layout.world == 8
    assert layout.stage == 4
    for stage in range(2):
        ranks = [rank for rank in range(8) if layout.coordinates(rank).pipeline == stage]
        assert sorted(layout.expert_rank(rank) for rank in ranks) == [0, 0, 1, 1]
    assert str(layout).endswith("pipeline 2 × expert 2")
