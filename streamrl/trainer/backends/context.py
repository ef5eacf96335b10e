"""Context parallelism: several ranks compute with the same rows, each with some of their columns.

Column `c` is with rank `c mod size`, so prompts, which predict nothing, and responses are shared out evenly. Whatever
looks at one token at a time (projections, norms, the head) needs no other rank. Around the attention the ranks exchange
columns for heads (DeepSpeed Ulysses, Jacobs et al., 2023): there each has all columns of its share of the heads. So
attention is computed as on one rank, whatever the mask, and is the same work on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from streamrl.trainer.packing import MicroBatch
from streamrl.types import NO_EXPERT


class Share(NamedTuple):
    """What one rank computes of a micro-batch; arrays of the shape `[rows, own_length]`, and of `[own_predicted]`."""

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    row_index: NDArray[np.int64]
    column_index: NDArray[np.int64]
    """Among this rank's columns."""
    target_ids: NDArray[np.int64]
    real: NDArray[np.bool_]
    """`[rows, own_length]` False for padding."""
    routed_experts: NDArray[np.uint8] | None
    """`[rows, own_length, layers · top_k]`"""
    most: int
    """Predicted positions of the rank that has most of them."""
    places: NDArray[np.int64]
    """`[predicted]`: where each of the micro-batch's predicted positions is, once those of all ranks, filled up to
    `most`, stand behind each other."""


class ContextGroup:
    """The ranks that share rows, as one of them sees it. Without a process group there is just one."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)

    def share(self, micro: MicroBatch) -> Share:
        """This rank's part of `micro`, whose rows are filled up so that each rank has as many columns."""
        owner = micro.column_index % self.size
        counts = np.bincount(owner, minlength=self.size)
        most = int(counts.max())
        firsts = most * np.arange(self.size) - (counts.cumsum() - counts)
        order = np.argsort(owner, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order)) + firsts[owner[order]]
        own = owner == self._rank
        return Share(
            input_ids=self.filled(micro.input_ids)[:, self._rank :: self.size],
            position_ids=self.filled(micro.position_ids)[:, self._rank :: self.size],
            row_index=micro.row_index[own],
            column_index=micro.column_index[own] // self.size,
            target_ids=micro.target_ids[own],
            real=np.arange(-(-micro.input_ids.shape[1] // self.size) * self.size)[self._rank :: self.size]
            < micro.visible_until[:, :1],
            routed_experts=None if micro.routed_experts is None else self._own_routes(micro.routed_experts),
            most=most,
            places=places,
        )

    def filled(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        """`array` `[rows, length]` with columns of zeros behind it, until each rank has as many."""
        return np.pad(array, ((0, 0), (0, -array.shape[1] % self.size)))

    def _own_routes(self, experts: NDArray[np.uint8]) -> NDArray[np.uint8]:
        behind = ((0, 0), (0, -experts.shape[1] % self.size), (0, 0))
        return np.pad(experts, behind, constant_values=NO_EXPERT)[:, self._rank :: self.size]

    def gather(self, own: Tensor, share: Share) -> Tensor:
        """`[predicted]` of the whole micro-batch on every rank, from each rank's `[own_predicted]`. Collective.

        Every rank computes the same loss from it, and in the backward pass goes on with the gradient of its own part.
        """
        if self._group is None:
            return own
        filled = torch.nn.functional.pad(own, (0, share.most - len(own)))
        whole: Tensor = _Gather.apply(filled, self._group)  # type: ignore[no-untyped-call]
        return whole[torch.from_numpy(share.places).to(own.device)]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """All columns of this rank's heads, `[rows, own_heads, length, head_dim]`, from its columns of all heads.

        Where there are more ranks than key heads, several get the same one. Collective.
        """
        if self._group is None:
            return query, key, value
        repeats = max(1, self.size // key.shape[1])
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        by_rank = [torch.unflatten(tensor, 1, (self.size, -1)) for tensor in (query, key, value)]
        sent = torch.cat(by_rank, 2).transpose(0, 1)  # [ranks, rows, own_heads, own_length, head_dim]
        found: Tensor = _Exchange.apply(sent, self._group)  # type: ignore[no-untyped-call]
        columns = found.permute(1, 2, 3, 0, 4).flatten(2, 3)
        return torch.split(columns, [tensor.shape[2] for tensor in by_rank], 1)

    def to_columns(self, mixed: Tensor) -> Tensor:
        """The inverse of `to_heads`, of the attention's output. Collective."""
        if self._group is None:
            return mixed
        sent = torch.unflatten(mixed, 2, (-1, self.size)).permute(3, 0, 1, 2, 4)
        found: Tensor = _Exchange.apply(sent, self._group)  # type: ignore[no-untyped-call]
        return found.transpose(0, 1).flatten(1, 2)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def heads_problem(*, heads: int, kv_heads: int, context: int) -> str | None:
    """Why `context` ranks cannot share the heads of an attention; None if they can."""
    if heads % context == 0 and (kv_heads % context == 0 or context % kv_heads == 0):
        return None
    return (
        f"context = {context} has to divide the {heads} query heads of a rank, and to divide its {kv_heads} key heads "
        "or be a multiple of them"
    )


class _Exchange(torch.autograd.Function):
    """`[ranks, ...]`: part `r` goes to rank `r`, and what it sent to this rank comes in its place."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = sent.contiguous()
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        found: Tensor = _Exchange.apply(gradients[0], ctx.group)  # type: ignore[no-untyped-call]
        return found, None


class _Gather(torch.autograd.Function):
    """`[ranks · each]` from `[each]` of each rank; the gradient is that of the rank's own part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.part = slice(len(own) * dist.get_rank(group), len(own) * (dist.get_rank(group) + 1))
        whole = own.new_empty(len(own) * dist.get_world_size(group))
        dist.all_gather_single(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.part], None
