"""Packing: every sampled token predicted once, seeing the right tokens; what a row shares computed once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.trainer.backends.context import ContextGroup
from streamrl.trainer.packing import attention_mask, pack
from streamrl.types import NO_EXPERT
from tests.trainer.models import branching_group, group_of

ALPHABET = [7, 3, 40]


@st.composite
def group_lists(draw, most=5):
    """Groups with prefixes in common at any depth: trajectories grow out of one another, from a small alphabet."""
    tokens = st.lists(st.sampled_from(ALPHABET), max_size=8)
    rng = np.random.default_rng(0)
    groups = []
    for seq in range(draw(st.integers(1, most))):
        ids = [draw(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=8))]
        for _ in range(draw(st.integers(0, 5))):
            parent = draw(st.sampled_from(ids))
            ids.append(parent[: draw(st.integers(1, len(parent)))] + draw(tokens))
        masks = [[False, *draw(st.lists(st.booleans(), min_size=len(p) - 1, max_size=len(p) - 1))] for p in ids]
        arrays = [np.array(path) for path in ids]
        groups.append(group_of(seq, rng, arrays, [np.array(mask, bool) for mask in masks], prompt=1))
    return groups


def trajectories(group):
    return [tuple(path.tolist()) for path in np.split(group.packed_input_ids, np.cumsum(group.seqlens)[:-1])]


def prefixes(paths):
    """The nodes of their trie."""
    return {path[:end] for path in paths for end in range(1, len(path) + 1)}


def paths_of(micro, groups):
    """`(group, number)` of each trajectory in a micro-batch, from `positions="ends"`."""
    for index, target in zip(micro.group_index.tolist(), micro.target_index.tolist(), strict=True):
        ends = (np.cumsum(groups[index].seqlens) - 1).tolist()
        yield index, ends.index(target)


@given(group_lists(), st.booleans(), st.sampled_from([16, 64, 4096]))
def test_every_sampled_token_sees_exactly_its_own_past(groups, share, max_tokens):
    seen: list[tuple[int, int]] = []
    longest = max(int(group.seqlens.max()) for group in groups)
    for micro in pack(groups, max_tokens=max_tokens, share_prefix=share):
        assert micro.tokens <= max(max_tokens, longest)
        mask = attention_mask(micro.visible_until)
        places = zip(micro.row_index, micro.column_index, micro.group_index, micro.target_index, strict=True)
        for number, (row, column, index, target) in enumerate(places):
            group = groups[index]
            ends = np.cumsum(group.seqlens)
            trajectory = int(np.searchsorted(ends, target, side="right"))
            start = int(ends[trajectory] - group.seqlens[trajectory])
            visible = np.flatnonzero(mask[row, 0, column])
            assert micro.input_ids[row, visible].tolist() == group.packed_input_ids[start:target].tolist()
            assert micro.position_ids[row, visible].tolist() == list(range(target - start))
            assert micro.target_ids[number] == group.packed_input_ids[target]
            seen.append((int(index), int(target)))
    wanted = [(i, int(t)) for i, g in enumerate(groups) for t in np.flatnonzero(g.packed_loss_mask)]
    assert sorted(seen) == wanted


@given(group_lists(), st.booleans(), st.sampled_from([16, 4096]))
def test_a_micro_batch_has_each_token_once_and_it_sees_its_own_path(groups, share, max_tokens):
    found = []
    for micro in pack(groups, max_tokens=max_tokens, share_prefix=share, positions="ends"):
        packed = list(paths_of(micro, groups))
        paths = [trajectories(groups[index])[number] for index, number in packed]
        nodes = prefixes(paths) if share else [path[:end] for path in paths for end in range(1, len(path) + 1)]
        mask = attention_mask(micro.visible_until)[0, 0]
        seen = [tuple(micro.input_ids[0, visible].tolist()) for visible in mask]
        assert sorted(seen) == sorted(nodes)
        assert micro.position_ids[0].tolist() == [len(path) - 1 for path in seen]
        assert micro.branched == (not (mask == np.tri(len(mask), dtype=bool)).all())
        found += packed
    assert sorted(found) == [(i, number) for i, group in enumerate(groups) for number in range(len(group.seqlens))]


@given(group_lists())
def test_one_micro_batch_computes_each_token_of_all_groups_once(groups):
    (micro,) = pack(groups, max_tokens=4096, share_prefix=True)
    assert micro.tokens == len(prefixes([path for group in groups for path in trajectories(group)]))
    states = micro.states()
    assert states.columns[states.of_prediction].tolist() == micro.column_index.tolist()
    assert len(states.columns) == len(set(micro.column_index.tolist()))


LENGTHS = {
    "short answers": (8, 16, lambda rng, count: rng.integers(3, 17, count)),
    "geometric": (128, 320, lambda rng, count: rng.geometric(1 / 64, count)),
    "log-normal": (64, 4096, lambda rng, count: rng.lognormal(5.5, 1.2, count).astype(int) + 1),
    "reasoning": (200, 7900, lambda rng, count: rng.gamma(1.5, 2000, count).astype(int) + 1),
}
"""Tokens of a prompt, most of a response, and lengths of responses as runs have them."""


def drawn_groups(rng, lengths, *, template=0, count=16):
    """Groups of eight with a prompt each, after a template that all share."""
    prompt, most, draw = LENGTHS[lengths]
    common, begun = rng.integers(0, 1000, template), template + prompt
    for seq in range(count):
        shared = np.concatenate([common, rng.integers(0, 1000, prompt)])
        ids = [np.concatenate([shared, rng.integers(0, 1000, min(n, most))]) for n in draw(rng, 8).tolist()]
        yield group_of(seq, rng, ids, [np.arange(len(path)) >= begun for path in ids], prompt=begun)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("share_prefix", [True, False])
def test_a_batch_takes_as_few_micro_batches_as_its_tokens_allow(lengths: str, share_prefix: bool) -> None:
    """No token is padding. A micro-batch more than the tokens fill is possible if trajectories are long."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        groups = list(drawn_groups(rng, lengths))
        longest = int(max(group.seqlens.max() for group in groups))
        micros = pack(groups, max_tokens=8192, share_prefix=share_prefix)
        computed = sum(micro.tokens for micro in micros)
        assert max(micro.tokens for micro in micros) <= 8192
        fewest = -(-computed // 8192)
        assert len(micros) <= fewest + (0 if longest < 2048 else 1 + fewest // 8)
        if not share_prefix:
            assert computed == sum(group.tokens for group in groups)


def test_a_template_of_all_groups_is_computed_once_in_each_micro_batch() -> None:
    """For example the descriptions of an agent's tools, of 2,000 tokens."""
    rng = np.random.default_rng(0)
    groups = list(drawn_groups(rng, "geometric", template=2000))
    micros = pack(groups, max_tokens=8192, share_prefix=True)
    own = sum(group.tokens - 2000 * group.size for group in groups)
    shared = sum(128 * (group.size - 1) for group in groups)  # prompts
    assert sum(micro.tokens for micro in micros) <= own - shared + len(micros) * (2000 + 128)
    assert len(micros) == -(-(own - shared) // (8192 - 2000))


@pytest.mark.parametrize("share_prefix", [True, False])
def test_each_token_is_given_its_experts(share_prefix: bool) -> None:
    """Here the experts of a token are its id, so that none is mistaken for another's."""
    group = branching_group(0, np.random.default_rng(0))
    group.packed_routed_experts = np.repeat(group.packed_input_ids, 4).astype(np.uint8)
    micros = pack([group], max_tokens=60, share_prefix=share_prefix)
    for micro in micros:
        assert micro.routed_experts is not None
        np.testing.assert_array_equal(micro.routed_experts, np.repeat(micro.input_ids[..., None], 4, -1))
    if not share_prefix:
        assert sum(micro.tokens for micro in micros) == group.tokens


@pytest.mark.parametrize("rank", range(3))
def test_ranks_that_share_rows_have_the_experts_of_their_own_columns(rank: int) -> None:
    group = branching_group(0, np.random.default_rng(0))
    group.packed_routed_experts = np.repeat(group.packed_input_ids, 4).astype(np.uint8)
    context = ContextGroup()
    context.size, context._rank = 3, rank
    for micro in pack([group], max_tokens=60, share_prefix=True):
        share = context.share(micro).micro
        assert share.routed_experts is not None
        assert share.routed_experts.shape == (*share.input_ids.shape, 4)
        known = share.routed_experts[..., 0] != NO_EXPERT
        assert known[share.row_index, share.column_index].all()
        np.testing.assert_array_equal(share.routed_experts[known][:, 3], share.input_ids[known])
