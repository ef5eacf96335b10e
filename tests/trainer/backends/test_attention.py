"""Attention under tree masks: the same numbers as with a dense mask, forward and backward, and never a dense mask."""

from __future__ import annotations

import math
import queue
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from streamrl.trainer.backends import attention
from streamrl.trainer.backends.attention import TreeBlocks, TreeMask, tree_tiles
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


class InThreads(ContextGroup):
    """A rank of a ring whose others are threads."""

    def __init__(self, rank, links):
        super().__init__()
        self.size, self.ring = len(links), True
        self._rank, self._links, self._passed = rank, links, 0

    def pass_on(self, tensor):
        number, self._passed = self._passed, self._passed + 1
        self._link((self._rank + 1) % self.size, number).put(tensor.clone())
        return lambda: self._link(self._rank, number).get(timeout=60)

    def _link(self, to, number):
        return self._links[to].setdefault(number, queue.Queue())


def filled(parents, size):
    """With padding, which sees itself alone, until each of `size` ranks has as many columns."""
    return parents + [-1] * (-len(parents) % size)


def in_a_ring(size, rows, inputs, gradient):
    """Output and gradients of the attention that `size` ranks compute together, put together again."""
    links = [{} for _ in range(size)]

    def compute(rank):
        own = [tensor[:, :, rank::size].detach().requires_grad_() for tensor in inputs]
        found = TreeMask(micro_of(rows), torch.device("cpu"), InThreads(rank, links)).attend(*own)
        return found.detach(), *torch.autograd.grad(found, own, gradient[:, :, rank::size])

    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(compute, range(size)))
    return [torch.stack(parts, 3).flatten(2, 3) for parts in zip(*ranks, strict=True)]


def assert_a_ring_equals_the_definition(size, rows, *, heads, dtype, tolerance):
    length = len(filled(rows[0], size))
    inputs, gradient = drawn(len(rows), length, heads=heads[0], kv_heads=heads[1], dtype=dtype)
    real = torch.arange(length) < len(rows[0])
    with torch.no_grad():
        gradient[:, :, ~real] = 0
    ours, *found = in_a_ring(size, rows, inputs, gradient)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    masks = torch.stack([dense(filled(parents, size)) for parents in rows])[:, None]
    wanted = by_the_definition(exact, masks)
    torch.testing.assert_close(ours[:, :, real].double(), wanted[:, :, real], rtol=0, atol=tolerance)
    for mine, theirs in zip(found, torch.autograd.grad(wanted, exact, gradient.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=5 * tolerance)


@settings(deadline=None, max_examples=30)
@given(
    forests(),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    st.sampled_from([(torch.float64, 1e-12), (torch.float32, 2e-5)]),
)
@pytest.mark.usefixtures("blockwise")
def test_ranks_in_a_ring_give_the_numbers_of_a_dense_mask(parents, size, heads, precision):
    dtype, tolerance = precision
    assert_a_ring_equals_the_definition(size, [parents], heads=heads, dtype=dtype, tolerance=tolerance)


@settings(deadline=None, max_examples=60)
@given(forests(), st.integers(1, 4), st.sampled_from([0, 1, 3, 8]))
def test_blocks_between_ranks_have_each_pair_that_sees_each_other_once(parents, size, dense_tokens):
    parents = filled(parents, size)
    mask = dense(parents)
    for rank in range(size):
        for step, (until, behind) in enumerate(InThreads(rank, [None] * size).seen(visible_until(parents))):
            source = (rank - step) % size
            blocks = TreeBlocks.of(until, dense_tokens=dense_tokens, behind=behind)
            found = torch.zeros(len(until), len(until), dtype=torch.int)
            for block in (*blocks.diagonal, *blocks.below):
                part = found[block.queries, block.keys]
                if block.mask is not None:
                    part += block.mask == 0
                else:
                    part += torch.ones_like(part).tril() if block.causal else 1
            assert torch.equal(found, mask[rank::size, source::size].int()), (rank, source)


def flex_by_the_definition(query, key, value, *, block_mask, scale, enable_gqa, return_aux, score_mod):
    """As `flex_attention`, which has no backward pass on a CPU; a query that sees no key has 0, and -inf."""
    assert enable_gqa
    assert score_mod is None
    assert return_aux.lse
    places = torch.arange(query.shape[2])
    sees = block_mask.mask_mod(None, None, places[:, None], places)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.mT * (scale or query.shape[-1] ** -0.5)).masked_fill(~sees, -1e30)
    some = sees.any(-1)
    found = torch.where(some[:, None], scores.softmax(-1) @ value, 0)
    return found, SimpleNamespace(lse=torch.where(some, scores.logsumexp(-1), -math.inf))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_a_ring_put_together_what_flex_attention_gives(size, monkeypatch):
    monkeypatch.setattr(attention, "_part", lambda until, behind, _: tree_tiles(torch.from_numpy(until), behind=behind))
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex_by_the_definition)
    parents = [0 if token in (15, 28) else 4 if token == 9 else token - 1 for token in range(37)]
    assert_a_ring_equals_the_definition(size, [parents], heads=(4, 2), dtype=torch.float64, tolerance=1e-12)


@given(forests(), st.sampled_from([2, 4]), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_tiles_of_flex_attention_say_what_the_mask_says(parents, tile, size):
    """Of one rank, and of the first of several in a ring."""
    parents = filled(parents, size)
    for step, (until, behind) in enumerate(InThreads(0, [None] * size).seen(visible_until(parents))):
        mask = dense(parents)[::size, -step % size :: size]
        tiles = tree_tiles(torch.from_numpy(until), tile=tile, behind=behind)
        places = torch.arange(len(until))
        assert torch.equal(tiles.mask_mod(None, None, places[:, None], places), mask)
        count = -(-len(until) // tile)
        listed = tiles.to_dense()[0, 0].bool()
        for query in range(count):
            rows = mask[query * tile : (query + 1) * tile]
            every = tiles.full_kv_indices[0, 0, query, : tiles.full_kv_num_blocks[0, 0, query]].tolist()
            for key in range(count):
                seen = rows[:, key * tile : (key + 1) * tile]
                assert listed[query, key] or not seen.any()
                assert listed[query, key] == seen.any() or step
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
