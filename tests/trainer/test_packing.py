"""Packing: every sampled token predicted once, from the right place, seeing the right tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.trainer.packing import PADDING_BRANCH, attention_mask, pack
from tests.trainer.models import random_group


@st.composite
def group_lists(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return [
        random_group(
            seq,
            rng,
            siblings=draw(st.integers(1, 5)),
            prompt=draw(st.integers(1, 12)),
            longest=draw(st.integers(1, 20)),
            gaps=draw(st.booleans()),
        )
        for seq in range(draw(st.integers(1, 5)))
    ]


def sibling_of(group, index):
    """Sibling, and first packed index of it, of a packed index."""
    ends = np.cumsum(group.seqlens)
    sibling = int(np.searchsorted(ends, index, side="right"))
    return sibling, int(ends[sibling] - group.seqlens[sibling])


@given(group_lists(), st.booleans(), st.sampled_from([16, 64, 4096]), st.sampled_from([4, 64]))
def test_every_sampled_token_sees_exactly_its_own_past(groups, share, max_tokens, hidden):
    seen: list[tuple[int, int]] = []
    longest = max(int(group.seqlens.max()) for group in groups)
    for micro in pack(groups, max_tokens=max_tokens, share_prefix=share, hidden_size=hidden):
        assert micro.tokens <= max(max_tokens, longest)
        mask = attention_mask(micro.branch)
        places = zip(micro.row_index, micro.column_index, micro.group_index, micro.target_index, strict=True)
        for row, column, index, target in places:
            group = groups[index]
            sibling, start = sibling_of(group, target)
            visible = np.flatnonzero(mask[row, 0, column])
            past = np.arange(start, target)
            assert micro.input_ids[row, visible].tolist() == group.packed_input_ids[past].tolist()
            assert micro.position_ids[row, visible].tolist() == list(range(target - start))
            seen.append((int(index), int(target)))
            assert 0 <= sibling < group.size
    wanted = [(i, int(t)) for i, g in enumerate(groups) for t in np.flatnonzero(g.packed_loss_mask)]
    assert sorted(seen) == wanted


@given(group_lists())
def test_padding_sees_itself_alone(groups):
    for micro in pack(groups, max_tokens=4096, share_prefix=True, hidden_size=64):
        mask = attention_mask(micro.branch)
        for row, column in zip(*np.nonzero(micro.branch == PADDING_BRANCH), strict=True):
            assert np.flatnonzero(mask[row, 0, column]).tolist() == [column]


def test_siblings_share_the_prompt_when_that_saves_work():
    rng = np.random.default_rng(0)
    group = random_group(0, rng, siblings=8, prompt=40, longest=8)
    shared = sum(m.tokens for m in pack([group], max_tokens=4096, share_prefix=True, hidden_size=512))
    apart = sum(m.tokens for m in pack([group], max_tokens=4096, share_prefix=False, hidden_size=512))
    assert shared == 40 + int((group.seqlens - 40).sum())
    assert apart >= int(group.seqlens.sum())


def test_long_responses_to_short_prompts_are_not_packed_together():
    rng = np.random.default_rng(0)
    group = random_group(0, rng, siblings=4, prompt=2, longest=200)
    micros = pack([group], max_tokens=4096, share_prefix=True, hidden_size=8)
    assert not any(micro.branched for micro in micros)
