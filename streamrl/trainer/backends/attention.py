"""Attention of packed rows, with memory that grows with the number of tokens.

In a row each token sees its ancestors in a tree (`packing.py`). Rows without branches are causal, and short rows use a
dense mask; on CPUs trees of short paths do, too, after they are cut and stacked. For all other rows the mask is cut
into blocks: on CPUs into the segments and subtrees of the tree, each a call of torch's flash kernel; on CUDA into the
tiles of `flex_attention`. Keys and values are never repeated for the query heads that share them (GQA).

In a ring of n ranks (`context.py`) each rank has every n-th column. So the part of another rank's keys that a rank's
queries see is a tree like the row's, or one in which no token sees itself: the same blocks, one set for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from streamrl.device import attend_without_plans, to_device
from streamrl.errors import TrainingError
from streamrl.scores import ScoreRules, attend_densely, register_attention
from streamrl.trainer.backends.context import ContextGroup
from streamrl.trainer.packing import MicroBatch, attention_mask

DENSE_TOKENS = 256
"""Maximal length of rows, and on CPUs of paths, with a dense mask; in longer ones, of subtrees."""
TILE = 128
"""Number of queries and keys of one tile of `flex_attention`'s block mask."""
LEAST_HEAD_DIM = 16
"""Size of the smallest heads that `flex_attention` computes on CUDA."""
UNSEEN = -1e30
"""Added to the score of an unseen key. Not infinite: a query that sees none of a block's keys then has a finite output,
with a denominator that is negligible next to the denominators of other blocks."""


class MaskBlock(NamedTuple):
    """A rectangle of the mask: some adjacent columns as queries, and some as keys."""

    queries: slice
    keys: slice
    causal: bool = False
    """Whether each query sees only the keys up to itself; otherwise, and without a mask, each sees all."""
    mask: Tensor | None = None
    """`[queries, keys]` float32, to be added to the scores."""


class TreeBlocks(NamedTuple):
    """A tree mask as blocks: each pair of columns in which one sees the other is in exactly one block."""

    diagonal: list[MaskBlock]
    """Blocks of a segment of the tree (a run of tokens with one child each), or of adjacent subtrees, with itself.
    Together they cover each column once."""
    below: list[MaskBlock]
    """Blocks of a segment's keys with the queries of all its descendants."""

    @classmethod
    def of(cls, visible_until: NDArray[np.int64], *, dense_tokens: int, behind: int = 0) -> TreeBlocks:
        """Return the blocks for `visible_until` `[length]` of a row. Adjacent subtrees of up to `dense_tokens` tokens
        together become one block with a dense mask, so that many short branches do not need a call each.

        `behind`: the least distance of a query behind a visible key; with 1, or if no query sees a key, blocks need not
        cover each column. Columns of queries and of keys may belong to different tokens.
        """
        length = len(visible_until) - behind
        visible_until = visible_until[:length] - behind
        changes = np.flatnonzero(np.diff(visible_until)) + 1
        blocks = cls([], [])

        def block(keys: slice, until: int, **seen: Any) -> MaskBlock:
            return MaskBlock(slice(keys.start + behind, until + behind), keys, **seen)

        start = 0
        while start < length:
            until = int(visible_until[start])
            if until - start > dense_tokens:
                following = int(np.searchsorted(changes, start, side="right"))
                end = min(until, int(changes[following]) if following < len(changes) else length)
                own = slice(start, end)
                blocks.diagonal.append(block(own, end, causal=True))
                if end < until:
                    blocks.below.append(MaskBlock(slice(end + behind, until + behind), own))
            else:
                end = start
                while end < length and visible_until[end] - start <= dense_tokens:
                    end = max(end + 1, int(visible_until[end]))
                own = slice(start, end)
                seen = visible_until[own] - start
                if (seen > np.arange(len(seen))).any():
                    mask = _dense(seen)
                    blocks.diagonal.append(block(own, end, causal=mask is None, mask=mask))
            start = end
        return blocks


def _dense(visible_until: NDArray[np.int64]) -> Tensor | None:
    """Return the mask of a few columns, for `MaskBlock`; None if it is causal."""
    if (visible_until == len(visible_until)).all():
        return None
    sees = torch.from_numpy(attention_mask(visible_until[None])[0, 0])
    return torch.zeros(sees.shape).masked_fill_(~sees, UNSEEN)


def tree_tiles(
    visible_until: Tensor,
    *,
    tile: int = TILE,
    behind: int = 0,
    positions: Tensor | None = None,
    window: int | None = None,
) -> BlockMask:
    """Return the tree mask of a row for `flex_attention`, from its `visible_until` `[length]`; `behind` as in
    `TreeBlocks`. With `window`, a token sees only keys less than that many `positions` (`[length]`) before it.

    The visible tiles follow from the smallest and the largest value in each tile of keys, so no tensor of the size
    length × length is made.
    """
    length = len(visible_until)
    count = -(-length // tile)
    tiles = pad(visible_until, (0, count * tile - length)).view(count, tile)
    number = torch.arange(count, device=visible_until.device)
    first, last = number * tile, ((number + 1) * tile).clamp(max=length) - 1
    some = (number[:, None] >= number) & (tiles.amax(1) > first[:, None])
    every = (number[:, None] > number) & (tiles.amin(1) > last[:, None])

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key + behind <= query) & (query < visible_until[key])

    if positions is not None and window is not None:
        some, every, in_tree = some | every, torch.zeros_like(every), sees

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return in_tree(_batch, _head, query, key) & (positions[query] - positions[key] < window)

    return BlockMask.from_kv_blocks(
        *_tile_lists(some & ~every),
        *_tile_lists(every),
        BLOCK_SIZE=tile,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _tile_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each tile of queries the number of `chosen` tiles of keys, and the tiles' numbers, the chosen ones
    first."""
    numbers = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], numbers.int()[None, None].contiguous()


Part = TreeBlocks | BlockMask
"""The mask between a rank's queries and one rank's keys, in the form for their device."""


def _part(visible_until: NDArray[np.int64], behind: int, device: torch.device) -> Part:
    if device.type == "cpu":
        return TreeBlocks.of(visible_until, dense_tokens=DENSE_TOKENS, behind=behind)
    return tree_tiles(to_device(visible_until, device), behind=behind)


class TreePiece(NamedTuple):
    """Adjacent subtrees with the same parent."""

    ancestors: list[int]
    """Columns of the tokens that all of them see."""
    start: int
    end: int
    """The subtrees' columns."""

    @property
    def length(self) -> int:
        return len(self.ancestors) + self.end - self.start


def tree_pieces(visible_until: NDArray[np.int64], *, width: int) -> list[TreePiece]:
    """Cut a forest into pieces of up to `width` tokens, ancestors included; no path may be longer than that."""
    until: list[int] = visible_until.tolist()
    pieces: list[TreePiece] = []
    ancestors: list[int] = []
    start = 0
    while start < len(until):
        while ancestors and until[ancestors[-1]] <= start:
            ancestors.pop()
        end = until[start]
        if len(ancestors) + end - start > width:
            ancestors.append(start)
            start += 1
            continue
        last = pieces[-1] if pieces else None
        if last is not None and last.ancestors == ancestors and last.length + end - start <= width:
            pieces[-1] = last._replace(end=end)
        else:
            pieces.append(TreePiece(ancestors.copy(), start, end))
        start = end
    return pieces


class TreeStack(NamedTuple):
    """A forest of short paths, stacked into rows: one kernel call for all of it. Each row is a `TreePiece`, so tokens
    with descendants in several rows are repeated."""

    columns: Tensor
    """`[stacked_rows · width]`: the forest's column at each place; any column at places behind a piece."""
    places: Tensor
    """`[length]`: a place of each column of the forest."""
    mask: Tensor
    """`[stacked_rows, 1, width, width]` bool, as from `attention_mask`."""

    @classmethod
    def of(cls, visible_until: NDArray[np.int64], *, most: int) -> TreeStack | None:
        """Return the stack with the fewest scores for `visible_until` `[length]`; None if a path is longer than
        `most`."""
        length = len(visible_until)
        ended = np.bincount(visible_until, minlength=length + 1).cumsum()[:length]  # subtrees, at each column
        width = int((np.arange(1, length + 1) - ended).max())  # the longest path
        cuts: list[list[TreePiece]] = []
        while width <= most:
            cuts.append(tree_pieces(visible_until, width=width))
            width += -(-width // 4)
        if not cuts:
            return None
        return cls._of_pieces(visible_until, min(cuts, key=lambda cut: len(cut) * max(x.length for x in cut) ** 2))

    @classmethod
    def _of_pieces(cls, visible_until: NDArray[np.int64], pieces: Sequence[TreePiece]) -> TreeStack:
        width = max(piece.length for piece in pieces)
        columns = np.zeros((len(pieces), width), np.int64)
        places = np.empty(len(visible_until), np.int64)
        seen_until = np.tile(np.arange(width) + 1, (len(pieces), 1))
        for row, (ancestors, start, end) in enumerate(pieces):
            shared, filled = len(ancestors), len(ancestors) + end - start
            columns[row, :shared], columns[row, shared:filled] = ancestors, np.arange(start, end)
            places[columns[row, :filled]] = row * width + np.arange(filled)
            seen_until[row, :shared], seen_until[row, shared:filled] = filled, visible_until[start:end] - start + shared
        return cls(
            torch.from_numpy(columns.ravel()), torch.from_numpy(places), torch.from_numpy(attention_mask(seen_until))
        )

    def stacked(self, row: Tensor) -> Tensor:
        """Return `[stacked_rows, heads, width, head_dim]` from `[1, heads, length, head_dim]`."""
        columns = row[0].transpose(0, 1).index_select(0, self.columns)
        return torch.unflatten(columns, 0, (len(self.mask), -1)).transpose(1, 2)

    def unstacked(self, stacked: Tensor) -> Tensor:
        """Undo `stacked`."""
        return stacked.transpose(1, 2).flatten(0, 1).index_select(0, self.places)[None].transpose(1, 2)


class TreeMask:
    """The attention mask of a micro-batch, in the form for its device."""

    def __init__(self, micro: MicroBatch, device: torch.device, context: ContextGroup) -> None:
        attend_without_plans(device)
        self._context = context
        self._micro = micro
        self._device = device
        self._dense: Tensor | None = None
        self._stack: TreeStack | None = None
        self._parts: list[Part] = []
        """One mask for each step of `ContextGroup.around`."""
        if not micro.branched and not context.ring:
            return
        visible_until = context.visible_until(micro)
        rows, length = visible_until.shape
        if not micro.branched:
            visible_until[:] = length  # padding may see anything
        if length <= DENSE_TOKENS and not context.ring:
            self._dense = to_device(attention_mask(visible_until), device)
            return
        # one after another, the rows are a forest
        forest = (visible_until + length * np.arange(rows)[:, None]).reshape(-1)
        if device.type == "cpu" and not context.ring:
            self._stack = TreeStack.of(forest, most=DENSE_TOKENS)
            if self._stack is not None:
                self._dense = self._stack.mask
                return
        self._parts = [_part(seen_until, behind, device) for seen_until, behind in context.seen(forest)]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, rules: ScoreRules | None = None
    ) -> Tensor:
        """Return the attention `[rows, heads, length, value_dim]`, from queries `[rows, heads, length, head_dim]`, and
        keys and values that may have fewer heads.

        `length`: number of this rank's columns. `scale`: factor of the scores; None for 1 / √head_dim. Collective over
        the context group.
        """
        query, key, value = _autocast(query, key, value)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        width, most = value.shape[-1], max(value.shape[-1], key.shape[-1])
        query, key, value = (pad(x, (0, most - x.shape[-1])) if x.shape[-1] < most else x for x in (query, key, value))
        rules = rules and rules.within(self._longest)
        if rules is None:
            mixed = self._attend_plainly(query, key, value, scale=scale)
        elif self._context.size > 1:
            raise TrainingError(
                "a model with sliding windows, capped scores or attention sinks cannot share its rows; set "
                "trainer.context_parallel = 1"
            )
        else:
            mixed = self._attend_by_rules(query, key, value, scale, rules)
        return mixed[..., :width]

    @property
    def _longest(self) -> int:
        return int(self._micro.position_ids.max()) + 1

    def _attend_plainly(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        if self._context.ring:
            return self._attend(query, key, value, scale=scale)
        mixed = self._attend(*self._context.to_heads(query, key, value), scale=scale)
        return self._context.to_columns(mixed)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
        """Return the attention as `attend`, over the given heads and columns."""
        if not self._parts and self._stack is None:
            return self._attend_densely(query, key, value, scale)
        rows, heads, length, head_dim = query.shape
        query, key, value = (_in_one_row(x) for x in (query, key, value))
        if (stack := self._stack) is not None:
            query, key, value = (stack.stacked(x) for x in (query, key, value))
            mixed = stack.unstacked(self._attend_densely(query, key, value, scale))
        elif isinstance(tiles := self._parts[0], BlockMask) and not self._context.ring:
            mixed, _ = _flex(query, key, value, tiles, scale)
        else:
            mixed = _Blockwise.apply(query, key, value, self._parts, scale, self._context)  # type: ignore[no-untyped-call]
        return mixed.transpose(1, 2).reshape(rows, length, heads, head_dim).transpose(1, 2)

    def _attend_by_rules(self, query: Tensor, key: Tensor, value: Tensor, scale: float, rules: ScoreRules) -> Tensor:
        """Return the attention as `attend`: on CPUs tree by tree with dense scores, on CUDA with `flex_attention`."""
        rows, heads, length, head_dim = query.shape
        query, key, value = (_in_one_row(x) for x in (query, key, value))
        micro = self._micro
        forest = (micro.visible_until + length * np.arange(rows)[:, None]).reshape(-1)
        positions = micro.position_ids.reshape(-1)
        if query.device.type == "cpu":
            parts = []
            for tree in _trees(forest):
                q, k, v = (x[:, :, tree] for x in (query, key, value))
                until, own = forest[tree] - tree.start, positions[tree]
                parts.append(_attend_by_rules_densely(q, k, v, until, own, scale=scale, rules=rules))
            mixed = torch.cat(parts, 2)
        else:
            columns = to_device(forest, self._device), to_device(positions, self._device)
            mixed = _flex_by_rules(query, key, value, *columns, scale=scale, rules=rules)
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


def _trees(forest: NDArray[np.int64]) -> list[slice]:
    """Return the columns of each tree; `forest`: `visible_until` `[columns]`."""
    found: list[slice] = []
    start = 0
    while start < len(forest):
        found.append(slice(start, int(forest[start])))
        start = found[-1].stop
    return found


def _attend_by_rules_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible_until: NDArray[np.int64],
    positions: NDArray[np.int64],
    *,
    scale: float,
    rules: ScoreRules,
) -> Tensor:
    """Return the attention `[1, heads, length, head_dim]` of one tree; `visible_until`, `positions`: `[length]`."""
    sees = attention_mask(visible_until[None])[0, 0]
    if rules.window is not None:
        sees &= positions[:, None] - positions < rules.window
    return attend_densely(query, key, value, torch.from_numpy(sees), scale=scale, rules=rules)


def _flex_by_rules(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible_until: Tensor,
    positions: Tensor,
    *,
    scale: float,
    rules: ScoreRules,
) -> Tensor:
    """Return the attention `[1, heads, length, head_dim]` of a forest; `visible_until`, `positions`: `[length]`."""
    tiles = tree_tiles(visible_until, positions=positions, window=rules.window)
    capped: Callable[..., Tensor] | None = None
    if (cap := rules.softcap) is not None:

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            return cap * (score / cap).tanh()

    found, log_sum = _flex(query, key, value, tiles, scale, score_mod=capped)
    if rules.sinks is not None:
        found = found * (log_sum - rules.sinks.float().view(1, -1, 1)).sigmoid()[..., None].to(found.dtype)
    return found


def _autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield `tensors` in the dtype in which torch's own attention would compute with them."""
    kind = tensors[0].device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[0].dtype
    return (tensor.to(wanted) for tensor in tensors)


def _in_one_row(tensor: Tensor) -> Tensor:
    """Return `[1, heads, rows · length, head_dim]` from `[rows, heads, length, head_dim]`."""
    return tensor.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Return `flex_attention`, compiled once for rows of all lengths."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


class _Blockwise(torch.autograd.Function):
    """Attention block by block; in a ring, with the keys of one rank after another.

    Forward: each block returns a softmax over its own keys and the logarithm of the softmax's denominator, with which
    the blocks of a query are combined (as in Ring Attention, Liu et al., 2023). Backward: given the whole output and
    the whole denominator, each block computes its share of the gradients, which add up; the gradients of keys and
    values travel around the ring with them, back to their own rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: Sequence[Part],
        scale: float | None,
        context: ContextGroup,
    ) -> Tensor:
        """Return the attention of this rank's columns; all tensors have the shape `[1, heads, length, head_dim]`.
        Collective in a ring."""
        sums = torch.promote_types(query.dtype, torch.float32)
        output = _laid_out_as_projected(query, sums)
        log_sums = torch.empty(query.shape[:3], dtype=sums, device=query.device)
        first = parts[0]
        covering = len(first.diagonal) if isinstance(first, TreeBlocks) else 1  # these blocks cover each query once
        for step, (part, (keys, values)) in enumerate(zip(parts, context.around(key, value), strict=True)):
            for number, (queries, found, log_sum) in enumerate(_computed(query, keys, values, part, scale)):
                if step == 0 and number < covering:
                    output[:, :, queries], log_sums[:, :, queries] = found, log_sum
                    continue
                before = log_sums[:, :, queries]
                both = torch.logaddexp(before, log_sum.to(sums))
                kept = output[:, :, queries].mul_((before - both).exp()[..., None])
                kept.addcmul_(found.to(sums), (log_sum - both).exp()[..., None])
                log_sums[:, :, queries] = both
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.parts, ctx.scale, ctx.context = parts, scale, context
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        gradient = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        found = [_laid_out_as_projected(tensor, log_sums.dtype).zero_() for tensor in (query, key, value)]
        for part, (keys, values) in zip(ctx.parts, ctx.context.around(key, value), strict=True):
            inputs = query, keys, values, part, ctx.scale
            for of_query, of_key, shares in _differentiated(gradient, output, log_sums, *inputs):
                for whole, columns, share in zip(found, (of_query, of_key, of_key), shares, strict=True):
                    whole[:, :, columns] += share
            if ctx.context.ring:
                found[1:] = ctx.context.pass_on(torch.stack(found[1:]))()
        return *(whole.to(query.dtype) for whole in found), None, None, None


def _computed(
    query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some columns of queries, with their output `[1, heads, queries, head_dim]` and log-sum-exp
    `[1, heads, queries]` over some keys, for all blocks of `part`."""
    if isinstance(part, TreeBlocks):
        for block in (*part.diagonal, *part.below):
            yield block.queries, *_flash(query, key, value, block, scale)
    else:
        yield slice(None), *_flex(query, key, value, part, scale)


def _differentiated(
    gradient: Tensor,
    output: Tensor,
    log_sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scale: float | None,
) -> Iterator[tuple[slice, slice, Sequence[Tensor]]]:
    """Yield some columns of queries and of keys, with their share of the gradients of queries, keys and values;
    `output` and `log_sums` are over all keys."""
    if isinstance(part, TreeBlocks):
        for block in (*part.diagonal, *part.below):
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
                scale=scale,
            )
            yield block.queries, block.keys, shares
        return
    with torch.enable_grad():
        query, key, value = inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        found, log_sum = _flex(query, key, value, part, scale)
    # The whole output is the sum of each part's own output, times exp(log_sum - log_sums); these factors add up to 1.
    of_found = (log_sum.detach() - log_sums).exp()[..., None] * gradient
    of_log_sum = (of_found * (found.detach() - output)).sum(-1)
    shares = torch.autograd.grad((found, log_sum), inputs, (of_found.to(found.dtype), of_log_sum.to(log_sum.dtype)))
    yield slice(None), slice(None), shares


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: BlockMask,
    scale: float | None,
    *,
    score_mod: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of all columns, as `_flash`."""
    head_dim = query.shape[-1]
    if head_dim < LEAST_HEAD_DIM:  # padding with zeros changes no score
        scale = head_dim**-0.5 if scale is None else scale
        query, key, value = (pad(tensor, (0, LEAST_HEAD_DIM - head_dim)) for tensor in (query, key, value))
    options: dict[str, Any] = {"block_mask": tiles, "scale": scale, "enable_gqa": True, "score_mod": score_mod}
    found, more = _compiled_flex_attention()(query, key, value, **options, return_aux=AuxRequest(lse=True))
    return found[..., :head_dim], more.lse


def _flash(query: Tensor, key: Tensor, value: Tensor, block: MaskBlock, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the output `[1, heads, queries, head_dim]` and log-sum-exp `[1, heads, queries]` of one block."""
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


def _mask_for(query: Tensor, block: MaskBlock) -> Tensor | None:
    """Return the block's mask in the dtype of the queries or in float32, as the kernel requires."""
    return block.mask.double() if block.mask is not None and query.dtype == torch.float64 else block.mask


def _laid_out_as_projected(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of the shape of `like`, laid out in memory as `[1, length, heads, head_dim]` for the
    projections around the attention."""
    return torch.empty_like(like.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)


# --- transformers' attention interface ---

TREE_ATTENTION = "streamrl_tree"
"""Name of the attention function in transformers, which then makes no mask of its own."""

register_attention(TREE_ATTENTION, "tree")
