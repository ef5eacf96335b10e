"""Attention under tree masks: the same numbers as with a dense mask, forward and backward, and never a dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from streamrl.trainer.backends import attention
from streamrl.trainer.backends.attention import TreeMask, tree_tiles
from streamrl.trainer.backends.context import ContextGroup
from streamrl.trainer.packing import MicroBatch


@st.composite
def forests(draw, *, most=40):
    """The parent of each token, -1 for roots, in depth-first order."""
    parents = [-1]
    path = [0]
    for token in range(1, draw(st.integers(1, most))):
        # mostly the token before: real rows are a few long runs
        up = draw(st.sampled_from([0, 0, 0, 0, 0, 1, 2, 3, len(path)]))
        path = path[: len(path) - up] if up < len(path) else []
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


def visible_until(parents):
    """As packing has it: behind the last descendant of each token."""
    found = np.arange(len(parents)) + 1
    for token in reversed(range(len(parents))):
        if parents[token] >= 0:
            found[parents[token]] = max(found[parents[token]], found[token])
    return found


def dense(parents):
    """`[length, length]`: each token sees itself and its ancestors."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for token in range(len(parents)):
        seen = token
        while seen >= 0:
            mask[token, seen] = True
            seen = parents[seen]
    return mask


def micro_of(rows):
    """Rows of trees as a micro-batch: only what attention looks at."""
    until = np.stack([visible_until(parents) for parents in rows])
    row, column = (places.ravel() for places in np.indices(until.shape))
    return MicroBatch(until, until, until, row, column, row, row, row)


def by_the_definition(inputs, mask):
    """Softmax of the scores, with the keys and values of a head repeated for its queries."""
    query, key, value = inputs
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def drawn(rows, length, *, heads, kv_heads, dtype, seed=0):
    """Queries, keys and values in memory as projections give them, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, length, count, 8) for count in (heads, kv_heads, kv_heads, heads)]
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_() for tensor in found[:3]], found[3]


@pytest.fixture(params=[1, 3, 8])
def blockwise(request, monkeypatch):
    """Dense masks for so many tokens at most, so that small rows are cut into blocks."""
    monkeypatch.setattr(attention, "DENSE_TOKENS", request.param)


@settings(deadline=None, max_examples=40)
@given(
    forests(),
    st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    st.sampled_from([(torch.float64, 1e-12), (torch.float32, 2e-5)]),
)
@pytest.mark.usefixtures("blockwise")
def test_blocks_give_the_numbers_of_a_dense_mask(parents, heads, precision):
    dtype, tolerance = precision
    inputs, gradient = drawn(1, len(parents), heads=heads[0], kv_heads=heads[1], dtype=dtype)
    ours = TreeMask(micro_of([parents]), torch.device("cpu"), ContextGroup()).attend(*inputs)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted = by_the_definition(exact, dense(parents))
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=tolerance)
    found = torch.autograd.grad(ours, inputs, gradient)
    for mine, theirs in zip(found, torch.autograd.grad(wanted, exact, gradient.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=5 * tolerance)


@pytest.mark.parametrize("length", [30, 600])
@pytest.mark.parametrize("trees", ["one chain", "branches"])
def test_rows_of_a_micro_batch_are_computed_together(length, trees):
    """Short rows by a dense mask, long ones by blocks; of several lengths, so that some are padded."""
    chain = [*range(-1, length - 1)]
    branches = [0 if token % 100 == 99 else parent for token, parent in enumerate(chain)]
    padded = [-1 if token > length - 20 else parent for token, parent in enumerate(chain)]
    rows = [chain, chain, padded] if trees == "one chain" else [branches, chain, padded]
    micro = micro_of(rows)
    if trees == "one chain":  # padding predicts nothing
        kept = (micro.row_index < 2) | (micro.column_index <= length - 20)
        micro.row_index, micro.column_index = micro.row_index[kept], micro.column_index[kept]
    assert micro.branched == (trees == "branches")
    inputs, gradient = drawn(len(rows), length, heads=4, kv_heads=2, dtype=torch.float64)
    with torch.no_grad():
        gradient[2, :, length - 19 :] = 0
    ours = TreeMask(micro, torch.device("cpu"), ContextGroup()).attend(*inputs)
    wanted = by_the_definition(inputs, torch.stack([dense(parents) for parents in rows])[:, None])
    real = gradient != 0
    torch.testing.assert_close(ours[real], wanted[real])
    for mine, theirs in zip(*(torch.autograd.grad(x, inputs, gradient) for x in (ours, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs)


@given(forests(), st.sampled_from([2, 4]))
@settings(deadline=None, max_examples=30)
def test_tiles_of_flex_attention_say_what_the_mask_says(parents, tile):
    mask = dense(parents)
    tiles = tree_tiles(torch.from_numpy(visible_until(parents)), tile=tile)
    count = -(-len(parents) // tile)
    listed = tiles.to_dense()[0, 0].bool()
    for query in range(count):
        rows = mask[query * tile : (query + 1) * tile]
        every = tiles.full_kv_indices[0, 0, query, : tiles.full_kv_num_blocks[0, 0, query]].tolist()
        for key in range(count):
            seen = rows[:, key * tile : (key + 1) * tile]
            assert listed[query, key] == seen.any()
            assert (key in every) == (bool(seen.all()) and seen.shape[1] == tile and key < query)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_numbers_of_a_dense_mask():
    """Its forward pass, as torch has it for CPUs; it has no backward pass there."""
    parents = [0 if token in (150, 280) else 40 if token == 90 else token - 1 for token in range(300)]
    inputs, _ = drawn(1, len(parents), heads=4, kv_heads=2, dtype=torch.float32)
    query, key, value = (tensor.detach() for tensor in inputs)
    tiles = tree_tiles(torch.from_numpy(visible_until(parents)))
    found = flex_attention(query, key, value, block_mask=tiles, enable_gqa=True)
    torch.testing.assert_close(found, by_the_definition((query, key, value), dense(parents)))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("length", [30, 600, 2000])
def test_on_a_gpu_the_numbers_are_those_of_a_dense_mask(length):
    """Compiled `flex_attention` for long rows, forward and backward."""
    parents = [0 if token % 100 == 99 else token - 1 for token in range(length)]
    inputs, gradient = drawn(2, length, heads=4, kv_heads=2, dtype=torch.float32)
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in inputs]
    ours = TreeMask(micro_of([parents] * 2), torch.device("cuda"), ContextGroup()).attend(*on_gpu)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted = by_the_definition(exact, dense(parents))
    torch.testing.assert_close(ours.cpu().double(), wanted, rtol=0, atol=1e-3)
    found = torch.autograd.grad(ours, on_gpu, gradient.cuda())
    for mine, theirs in zip(found, torch.autograd.grad(wanted, exact, gradient.double()), strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=0, atol=1e-3)
