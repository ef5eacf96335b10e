"""Attention of packed rows, in memory that grows with their tokens.

In a row each token sees its ancestors in a tree (`packing.py`). Rows without branches are causal, and short rows get a
dense mask. For all others the mask is cut into blocks: on CPUs into those that the tree is made of, each a call of
torch's flash kernel; on CUDA into the tiles of `flex_attention`. Keys and values are never repeated for the query heads
that share them (GQA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from streamrl.trainer.backends.context import ContextGroup
from streamrl.trainer.packing import MicroBatch, attention_mask

DENSE_TOKENS = 256
"""Rows up to this length have a dense mask; in longer ones, subtrees up to it."""
TILE = 128
"""Queries and keys of one tile of `flex_attention`'s block mask."""


class Block(NamedTuple):
    """A rectangle of the mask: some neighbouring columns as queries, and some as keys."""

    queries: slice
    keys: slice
    causal: bool = False
    """Whether each query sees the keys up to itself alone; else, and without a mask, each sees all."""
    mask: Tensor | None = None
    """`[queries, keys]` float32, to be added to the scores."""


class TreeBlocks(NamedTuple):
    """A tree mask as blocks: each pair of columns that see each other is in one of them."""

    diagonal: list[Block]
    """A segment of the tree (a run of tokens with one child each), or neighbouring subtrees, against itself. Together
    they cover each column once."""
    below: list[Block]
    """Against a segment, all that descends from it."""

    @classmethod
    def of(cls, visible_until: NDArray[np.int64], *, dense_tokens: int) -> TreeBlocks:
        """From `visible_until` `[length]` of a row. Neighbouring subtrees of up to `dense_tokens` tokens together
        become one block with a dense mask, so that many short branches are not as many calls."""
        length = len(visible_until)
        changes = np.flatnonzero(np.diff(visible_until)) + 1
        blocks = cls([], [])
        start = 0
        while start < length:
            end = int(visible_until[start])
            if end - start > dense_tokens:
                until = end
                following = int(np.searchsorted(changes, start, side="right"))
                end = int(changes[following]) if following < len(changes) else length
                own = slice(start, end)
                blocks.diagonal.append(Block(own, own, causal=True))
                if end < until:
                    blocks.below.append(Block(slice(end, until), own))
            else:
                while end < length and visible_until[end] - start <= dense_tokens:
                    end = int(visible_until[end])
                own = slice(start, end)
                mask = _dense(visible_until[own] - start)
                blocks.diagonal.append(Block(own, own, causal=mask is None, mask=mask))
            start = end
        return blocks


def _dense(visible_until: NDArray[np.int64]) -> Tensor | None:
    """The mask of a few columns, for `Block`; None if it is plainly causal."""
    if (visible_until == len(visible_until)).all():
        return None
    sees = torch.from_numpy(attention_mask(visible_until[None])[0, 0])
    return torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf)


def tree_tiles(visible_until: Tensor, *, tile: int = TILE) -> BlockMask:
    """The tree mask of a row as `flex_attention` wants it, from its `visible_until` `[length]`.

    Which tiles are seen follows from the least and the largest value in each tile of keys, so that nothing of the size
    length × length is made.
    """
    length = len(visible_until)
    count = -(-length // tile)
    tiles = torch.nn.functional.pad(visible_until, (0, count * tile - length)).view(count, tile)
    number = torch.arange(count, device=visible_until.device)
    first, last = number * tile, ((number + 1) * tile).clamp(max=length) - 1
    some = (number[:, None] >= number) & (tiles.amax(1) > first[:, None])
    every = (number[:, None] > number) & (tiles.amin(1) > last[:, None])

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < visible_until[key])

    return BlockMask.from_kv_blocks(
        *_tile_lists(some & ~every),
        *_tile_lists(every),
        BLOCK_SIZE=tile,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _tile_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For each tile of queries how many tiles of keys are `chosen`, and their numbers, before those that are not."""
    numbers = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], numbers.int()[None, None].contiguous()


class TreeMask:
    """Who sees whom in a micro-batch, in the form that its device computes with."""

    def __init__(self, micro: MicroBatch, device: torch.device, context: ContextGroup) -> None:
        self._context = context
        self._dense: Tensor | None = None
        self._forest: TreeBlocks | BlockMask | None = None
        if not micro.branched:
            return
        visible_until = context.filled(micro.visible_until)
        rows, length = visible_until.shape
        visible_until = np.maximum(visible_until, np.arange(length) + 1)
        if length <= DENSE_TOKENS:
            self._dense = torch.from_numpy(attention_mask(visible_until)).to(device, non_blocking=True)
            return
        # row behind row they are one forest
        forest = (visible_until + length * np.arange(rows)[:, None]).reshape(-1)
        if device.type == "cpu":
            self._forest = TreeBlocks.of(forest, dense_tokens=DENSE_TOKENS)
        else:
            self._forest = tree_tiles(torch.from_numpy(forest).to(device, non_blocking=True))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
        """`[rows, heads, length, head_dim]`, from queries of that shape, and keys and values that may have fewer heads.

        `length`: of this rank's columns. `scale`: what scores are multiplied by; None: 1 / √head_dim. Collective over
        the context group.
        """
        mixed = self._attend(*self._context.to_heads(*_autocast(query, key, value)), scale=scale)
        return self._context.to_columns(mixed)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """As `attend`, of all columns of the rows."""
        if self._forest is None:
            return self._attend_densely(query, key, value, scale)
        rows, heads, length, head_dim = query.shape
        query, key, value = (_in_one_row(x) for x in (query, key, value))
        if isinstance(self._forest, TreeBlocks):
            mixed: Tensor = _Blockwise.apply(query, key, value, self._forest, scale)  # type: ignore[no-untyped-call]
        else:
            mixed = _compiled_flex_attention()(query, key, value, block_mask=self._forest, scale=scale, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(rows, length, heads, head_dim).transpose(1, 2)

    def _attend_densely(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        if self._dense is not None and repeats > 1 and query.device.type != "cpu":
            # CUDA's fast kernels take either a mask or fewer key than query heads; the row is short
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self._dense,
            is_causal=self._dense is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """`tensors` in the dtype in which torch's own attention would compute with them."""
    kind = tensors[0].device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[0].dtype
    return (tensor.to(wanted) for tensor in tensors)


def _in_one_row(tensor: Tensor) -> Tensor:
    """`[1, heads, rows · length, head_dim]` from `[rows, heads, length, head_dim]`."""
    return tensor.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Compiled once for rows of all lengths."""
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled


class _Blockwise(torch.autograd.Function):
    """Attention by torch's flash kernel for CPUs, block by block.

    Forward: each block gives a softmax over its own keys and the logarithm of that softmax's denominator, with which
    the blocks of a query are put together (as in Ring Attention, Liu et al., 2023). Backward: given the whole output
    and the whole denominator, the kernel's backward pass gives each block's share of the gradients, which add up.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: TreeBlocks, scale: float | None) -> Tensor:
        """All of the shape `[1, heads, length, head_dim]`."""
        sums = torch.promote_types(query.dtype, torch.float32)
        output = _laid_out_as_projected(query, sums)
        log_sums = torch.empty(query.shape[:3], dtype=sums)
        for block in blocks.diagonal:
            output[:, :, block.queries], log_sums[:, :, block.queries] = _flash(query, key, value, block, scale)
        for block in blocks.below:
            found, log_sum = _flash(query, key, value, block, scale)
            before = log_sums[:, :, block.queries]
            both = torch.logaddexp(before, log_sum)
            kept = output[:, :, block.queries].mul_((before - both).exp()[..., None])
            kept.addcmul_(found.to(sums), (log_sum - both).exp()[..., None])
            log_sums[:, :, block.queries] = both
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.blocks, ctx.scale = blocks, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        gradient = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        found = [_laid_out_as_projected(tensor, log_sums.dtype).zero_() for tensor in (query, key, value)]

        for block in (*ctx.blocks.diagonal, *ctx.blocks.below):
            shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, block.queries],
                query[:, :, block.queries],
                key[:, :, block.keys],
                value[:, :, block.keys],
                output[:, :, block.queries],
                log_sums[:, :, block.queries],
                0.0,
                block.causal,
                attn_mask=_mask_for(query, block),
                scale=ctx.scale,
            )
            for whole, columns, share in zip(found, (block.queries, block.keys, block.keys), shares, strict=True):
                whole[:, :, columns] += share
        return *(whole.to(query.dtype) for whole in found), None, None


def _flash(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output `[1, heads, queries, head_dim]` and log-sum-exp `[1, heads, queries]` of one block."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[:, :, block.queries],
        key[:, :, block.keys],
        value[:, :, block.keys],
        0.0,
        block.causal,
        attn_mask=_mask_for(query, block),
        scale=scale,
    )
    return found


def _mask_for(query: Tensor, block: Block) -> Tensor | None:
    """The kernel wants masks in the dtype of the queries or in float32."""
    return block.mask.double() if block.mask is not None and query.dtype == torch.float64 else block.mask


def _laid_out_as_projected(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of the shape of `like`, in memory `[1, length, heads, head_dim]` as the projections around the
    attention want it."""
    return torch.empty_like(like.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)
