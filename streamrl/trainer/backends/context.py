"""Context parallelism: several ranks compute the same rows, each some of their columns.

Column `c` is on rank `c mod size`, so prompts, which predict nothing, and responses are divided evenly. Layers that
compute each token separately (projections, norms, the head) need no other rank. There are two methods for the
attention:

- If the heads can be divided, the ranks exchange columns for heads (DeepSpeed Ulysses, Jacobs et al., 2023): each has
  all columns of its share of the heads, and computes as a single rank does.
- Otherwise keys and values travel around the ranks as in a ring (Ring Attention, Liu et al., 2023; with columns dealt
  like this, Striped Attention, Brandon et al., 2023): each rank computes its own queries of all heads, with the keys of
  one rank after another. `attention.py` combines the results.

With both methods, the ranks have equal work for any mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from streamrl.device import to_device
from streamrl.trainer.packing import MicroBatch
from streamrl.types import NO_EXPERT

Scalar = TypeVar("Scalar", bound=np.generic)


class Share(NamedTuple):
    """One rank's part of a micro-batch."""

    micro: MicroBatch
    """The rank's own columns, and the tokens that they predict. Columns are counted among the rank's own."""
    real: NDArray[np.bool_]
    """`[rows, own_length]`: False for padding columns."""
    most: int
    """Number of predicted positions on the rank that has most of them."""
    places: NDArray[np.int64]
    """`[predicted]`: index of each predicted position of the micro-batch in the concatenated positions of all ranks,
    each padded to `most`."""


class ContextGroup:
    """This rank's view of the ranks that share rows. Without a process group it is the only one."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, ring: bool = False) -> None:
        """`ring`: keys travel around the ranks; otherwise the ranks exchange columns for heads (see
        `heads_can_be_shared`)."""
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.ring = ring and self.size > 1
        self._rank = 0 if group is None else dist.get_rank(group)

    def share(self, micro: MicroBatch) -> Share:
        """Return this rank's part of `micro`, with rows padded so that all ranks have equally many columns."""
        owner = micro.column_index % self.size
        counts = np.bincount(owner, minlength=self.size)
        most = int(counts.max())
        firsts = most * np.arange(self.size) - (counts.cumsum() - counts)
        order = np.argsort(owner, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order)) + firsts[owner[order]]
        own = owner == self._rank
        real = np.ones(micro.input_ids.shape, bool)
        experts = micro.routed_experts
        mine = MicroBatch(
            input_ids=self._own(micro.input_ids),
            position_ids=self._own(micro.position_ids),
            visible_until=self._seen_of(self.visible_until(micro), self._rank),
            row_index=micro.row_index[own],
            column_index=micro.column_index[own] // self.size,
            group_index=micro.group_index[own],
            target_index=micro.target_index[own],
            target_ids=micro.target_ids[own],
            routed_experts=None if experts is None else self._own(experts, fill=NO_EXPERT),
        )
        return Share(mine, self._own(real), most, places)

    def visible_until(self, micro: MicroBatch) -> NDArray[np.int64]:
        """Return `visible_until` of `micro`, padded at the end so that all ranks have equally many columns."""
        found = self._filled(micro.visible_until)
        return np.maximum(found, np.arange(found.shape[1]) + 1)

    def _filled(self, array: NDArray[Scalar], *, fill: int = 0) -> NDArray[Scalar]:
        """Return `array` `[rows, length, ...]`, padded at the end with `fill` so that all ranks have equally many
        columns."""
        behind = [(0, 0), (0, -array.shape[1] % self.size), *[(0, 0)] * (array.ndim - 2)]
        return np.pad(array, behind, constant_values=fill)

    def _own(self, array: NDArray[Scalar], *, fill: int = 0) -> NDArray[Scalar]:
        return self._filled(array, fill=fill)[:, self._rank :: self.size]

    def _seen_of(self, visible_until: NDArray[np.int64], source: int) -> NDArray[np.int64]:
        """Return, for each column of rank `source`, the first of this rank's later columns that does not see it,
        counted among this rank's. `visible_until`: of all columns (last axis)."""
        return -(-(visible_until[..., source :: self.size] - self._rank) // self.size)

    def seen(self, visible_until: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], int]]:
        """Return the mask of this rank's queries for the keys of each step of `around`, from `visible_until`
        `[columns]` of all columns. A mask is the first query that no longer sees each key, and the least distance of a
        query behind a visible key (0 or 1), both counted among a rank's columns."""
        if not self.ring:
            return [(visible_until, 0)]
        sources = [(self._rank - step) % self.size for step in range(self.size)]
        return [(self._seen_of(visible_until, source), int(source > self._rank)) for source in sources]

    def around(self, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's keys and values; in a ring then the previous rank's, and so on. Collective."""
        if not self.ring:
            yield key, value
            return
        held = torch.stack((key, value))
        for step in range(self.size):
            arrived = self.pass_on(held) if step < self.size - 1 else None
            key, value = held
            yield key, value
            if arrived is not None:
                held = arrived()

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to send `tensor` to the next rank of the ring; return a function that waits for the previous rank's
        tensor and returns it. Collective."""
        sent = tensor.contiguous()
        found = torch.empty_like(sent)
        to, by = [0] * self.size, [0] * self.size
        to[(self._rank + 1) % self.size] = by[(self._rank - 1) % self.size] = len(sent)
        work = dist.all_to_all_single(found, sent, by, to, group=self._group, async_op=True)

        def arrived(sent: Tensor = sent) -> Tensor:  # `sent` lives until the operation is complete
            assert work is not None
            work.wait()
            return found

        return arrived

    def gather(self, own: Tensor, share: Share) -> Tensor:
        """Return `[predicted]` of the whole micro-batch on every rank, from each rank's `[own_predicted]`. Collective.

        Every rank computes the same loss from it; the backward pass continues with the gradient of the rank's own part.
        """
        if self._group is None:
            return own
        filled = torch.nn.functional.pad(own, (0, share.most - len(own)))
        whole: Tensor = _Gather.apply(filled, self._group)  # type: ignore[no-untyped-call]
        return whole.index_select(0, to_device(share.places, own.device))

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return all columns of this rank's heads, `[rows, own_heads, length, head_dim]`, from its columns of all
        heads.

        If there are more ranks than key heads, several ranks get the same one. Collective.
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
        """Undo `to_heads`, on the attention's output. Collective."""
        if self._group is None:
            return mixed
        sent = torch.unflatten(mixed, 2, (-1, self.size)).permute(3, 0, 1, 2, 4)
        found: Tensor = _Exchange.apply(sent, self._group)  # type: ignore[no-untyped-call]
        return found.transpose(0, 1).flatten(1, 2)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def heads_can_be_shared(*, heads: int, kv_heads: int, context: int) -> bool:
    """Whether each of `context` ranks can have equally many query heads, and whole key heads or a part of one."""
    return heads % context == 0 and (kv_heads % context == 0 or context % kv_heads == 0)


class _Exchange(torch.autograd.Function):
    """`[ranks, ...]`: send part `r` to rank `r`, and replace it by the part received from that rank."""

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
    """`[ranks · each]` from `[each]` of each rank; the gradient is the gradient of the rank's own part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.part = slice(len(own) * dist.get_rank(group), len(own) * (dist.get_rank(group) + 1))
        whole = own.new_empty(dist.get_world_size(group), len(own))
        dist.all_gather(list(whole), own.contiguous(), group=group)  # for one tensor, torch's versions differ in name
        return whole.flatten()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.part], None
