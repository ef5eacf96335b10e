"""Packing: every sampled token predicted once, seeing the right tokens; what a row shares computed once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.trainer.backends.context import ContextGroup
from streamrl.trainer.packing import attention_mask, pack
from streamrl.types import NO_EXPERT
from tests.trainer.models import branching_group, group_of, random_group

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


def rows_of(groups, **options):
    """`(group, its trajectories in the tree, micro-batch, columns of the tree)` of all trees of all micro-batches."""
    for micro in pack(groups, positions="ends", **options):
        for columns in trees_of(micro):
            mine = (columns.start <= micro.column_index) & (micro.column_index < columns.stop)
            (index,) = set(micro.group_index[mine].tolist())
            ends = np.cumsum(groups[index].seqlens) - 1
            numbers = np.searchsorted(ends, micro.target_index[mine])
            assert ends[numbers].tolist() == micro.target_index[mine].tolist()
            yield index, numbers.tolist(), micro, columns


def trees_of(micro):
    """The columns of each tree: up to the first that does not see its root."""
    (until,) = micro.visible_until
    start = 0
    while start < len(until):
        yield slice(start, int(until[start]))
        start = int(until[start])


def cost(tokens, hidden):
    return tokens * (1 + tokens / (6 * hidden))


@given(group_lists(), st.booleans(), st.sampled_from([16, 64, 4096]), st.sampled_from([4, 64]))
def test_every_sampled_token_sees_exactly_its_own_past(groups, share, max_tokens, hidden):
    seen: list[tuple[int, int]] = []
    longest = max(int(group.seqlens.max()) for group in groups)
    for micro in pack(groups, max_tokens=max_tokens, share_prefix=share, hidden_size=hidden):
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


@given(group_lists(), st.booleans(), st.sampled_from([16, 4096]), st.sampled_from([4, 64, 4096]))
def test_a_tree_has_each_token_once_and_it_sees_its_own_path(groups, share, max_tokens, hidden):
    found = []
    for index, numbers, micro, columns in rows_of(
        groups, max_tokens=max_tokens, share_prefix=share, hidden_size=hidden
    ):
        nodes = prefixes([trajectories(groups[index])[number] for number in numbers])
        ids, positions = micro.input_ids[0, columns], micro.position_ids[0, columns]
        mask = attention_mask(micro.visible_until)[0, 0, columns]
        assert not mask[:, : columns.start].any()
        assert not mask[:, columns.stop :].any()
        paths = [tuple(ids[visible].tolist()) for visible in mask[:, columns]]
        assert sorted(paths) == sorted(nodes)
        assert positions.tolist() == [len(path) - 1 for path in paths]
        alone = len(mask) == micro.tokens
        assert micro.branched or (alone and (mask == np.tri(len(nodes), dtype=bool)).all())
        assert len(numbers) == 1 or share
        found += [(index, number) for number in numbers]
    assert sorted(found) == [(i, number) for i, group in enumerate(groups) for number in range(len(group.seqlens))]


LENGTHS = {
    "short answers": (8, 16, lambda rng, count: rng.integers(3, 17, count)),
    "geometric": (128, 320, lambda rng, count: rng.geometric(1 / 64, count)),
    "log-normal": (64, 4096, lambda rng, count: rng.lognormal(5.5, 1.2, count).astype(int) + 1),
    "reasoning": (200, 7900, lambda rng, count: rng.gamma(1.5, 2000, count).astype(int) + 1),
}
"""Tokens of a prompt, most of a response, and lengths of responses as runs have them."""


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("share_prefix", [True, False])
def test_a_batch_takes_as_few_micro_batches_as_its_tokens_allow(lengths: str, share_prefix: bool) -> None:
    """No token is padding. A micro-batch more than the tokens fill is possible where trees are large."""
    prompt, most, draw = LENGTHS[lengths]
    rng = np.random.default_rng(0)
    for seed in range(5):
        groups = []
        for seq in range(16):
            shared = rng.integers(0, 1000, prompt)
            ids = [np.concatenate([shared, rng.integers(0, 1000, min(n, most))]) for n in draw(rng, 8).tolist()]
            groups.append(group_of(seq, rng, ids, [np.arange(len(path)) >= prompt for path in ids], prompt=prompt))
        max_tokens = 8192 if seed else int(max(group.seqlens.max() for group in groups))
        micros = pack(groups, max_tokens=max_tokens, share_prefix=share_prefix, hidden_size=2048)
        trees = [columns.stop - columns.start for micro in micros for columns in trees_of(micro)]
        largest = max(trees)
        assert largest <= max_tokens
        assert sum(micro.tokens for micro in micros) == sum(trees)
        fewest = -(-sum(trees) // max_tokens)
        assert len(micros) <= fewest + (0 if largest < max_tokens / 4 else 1 + fewest // 4)
        if not share_prefix:
            assert sum(trees) == sum(group.tokens for group in groups)


@given(group_lists(most=1), st.sampled_from([16, 4096]), st.sampled_from([2, 64, 4096]))
def test_no_other_rows_of_neighbours_cost_less(groups, max_tokens, hidden):
    paths = sorted(trajectories(groups[0]))
    least = [0.0]
    for end in range(1, len(paths) + 1):
        sizes = [(first, len(prefixes(paths[first:end]))) for first in range(end)]
        allowed = [(first, size) for first, size in sizes if size <= max_tokens or first == end - 1]
        least.append(min(least[first] + cost(size, hidden) for first, size in allowed))
    trees = rows_of(groups, max_tokens=max_tokens, share_prefix=True, hidden_size=hidden)
    sizes = [len(prefixes([trajectories(groups[0])[number] for number in numbers])) for _, numbers, _, _ in trees]
    assert np.isclose(sum(cost(size, hidden) for size in sizes), least[-1])


@given(group_lists())
def test_one_row_computes_each_token_of_the_trie_once(groups):
    for group in groups:
        micros = pack([group], max_tokens=4096, share_prefix=True, hidden_size=1_000_000)  # attention costs nothing
        assert sum(micro.tokens for micro in micros) == len(prefixes(trajectories(group)))


def test_trajectories_share_what_they_begin_with_when_that_saves_work():
    group = branching_group(0, np.random.default_rng(0), prompt=40, turn=10)
    (shared,) = pack([group], max_tokens=4096, share_prefix=True, hidden_size=512)
    apart = pack([group], max_tokens=4096, share_prefix=False, hidden_size=512)
    assert shared.branched
    assert shared.tokens == 40 + 10 + 2 * 10 + 4 * 10
    assert sum(micro.tokens for micro in apart) >= int(group.seqlens.sum())


def test_a_conversation_that_only_grows_needs_no_mask():
    history = np.arange(40)
    calls = [history[:length] for length in (10, 20, 30, 40)]
    group = group_of(0, np.random.default_rng(0), calls, [call % 10 > 5 for call in calls], prompt=5)
    (micro,) = pack([group], max_tokens=4096, share_prefix=True, hidden_size=512)
    assert micro.input_ids.tolist() == [history.tolist()]
    assert not micro.branched


def test_long_responses_to_short_prompts_share_no_tree():
    rng = np.random.default_rng(0)
    group = random_group(0, rng, siblings=4, prompt=2, longest=200)
    trees = rows_of([group], max_tokens=4096, share_prefix=True, hidden_size=8)
    assert [len(numbers) for _, numbers, _, _ in trees] == [1] * 4


@pytest.mark.parametrize("share_prefix", [True, False])
def test_each_token_is_given_its_experts(share_prefix: bool) -> None:
    """Here the experts of a token are its id, so that none is mistaken for another's."""
    group = branching_group(0, np.random.default_rng(0))
    group.packed_routed_experts = np.repeat(group.packed_input_ids, 4).astype(np.uint8)
    micros = pack([group], max_tokens=60, share_prefix=share_prefix, hidden_size=32)
    for micro in micros:
        assert micro.routed_experts is not None
        np.testing.assert_array_equal(micro.routed_experts, np.repeat(micro.input_ids[..., None], 4, -1))
    if not share_prefix:
        assert sum(micro.tokens for micro in micros) == group.tokens


def test_groups_without_experts_are_packed_with_others() -> None:
    known, silent = (random_group(seq, np.random.default_rng(seq), siblings=1, prompt=9) for seq in (0, 1))
    known.packed_routed_experts = np.repeat(known.packed_input_ids, 4).astype(np.uint8)
    [micro] = pack([known, silent], max_tokens=60, share_prefix=True, hidden_size=32)
    assert micro.routed_experts is not None
    experts = dict(zip(micro.group_index.tolist(), micro.routed_experts[0, micro.column_index], strict=False))
    assert (experts[1] == NO_EXPERT).all()
    assert (experts[0] != NO_EXPERT).all()
    assert int((micro.routed_experts[..., 0] != NO_EXPERT).sum()) == known.tokens
    [bare] = pack([silent], max_tokens=60, share_prefix=True, hidden_size=32)
    assert bare.routed_experts is None


@pytest.mark.parametrize("rank", range(3))
def test_ranks_that_share_rows_have_the_experts_of_their_own_columns(rank: int) -> None:
    group = branching_group(0, np.random.default_rng(0))
    group.packed_routed_experts = np.repeat(group.packed_input_ids, 4).astype(np.uint8)
    context = ContextGroup()
    context.size, context._rank = 3, rank
    for micro in pack([group], max_tokens=60, share_prefix=True, hidden_size=32):
        share = context.share(micro).micro
        assert share.routed_experts is not None
        assert share.routed_experts.shape == (*share.input_ids.shape, 4)
        known = share.routed_experts[..., 0] != NO_EXPERT
        assert known[share.row_index, share.column_index].all()
        np.testing.assert_array_equal(share.routed_experts[known][:, 3], share.input_ids[known])
