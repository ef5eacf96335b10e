"""The part of each weight that a data-parallel rank holds: all of it, or its rows.

Rows are dealt as FSDP2 deals them: chunks of `ceil(rows / world)`, so the last ranks may have
fewer, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streamrl.errors import ModelError


class Shard(msgspec.Struct):
    """One weight."""

    shape: tuple[int, ...]
    """Of the whole."""
    local: Tensor
    """This rank's rows; shares memory with the model."""

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Shard:
        return cls(tuple(parameter.shape), _local(parameter))


class Shards:
    """The weights of one model on this rank, and how to gather and load tensors that are spread like them."""

    def __init__(self, weights: dict[str, Shard], *, world: int, sharded: bool) -> None:
        """Collective when `sharded`: the ranks form a group for gathering alone, so that it may run beside
        the computation."""
        self._weights = weights
        self._world = world
        self._rank = dist.get_rank() if world > 1 else 0
        self._group = dist.new_group() if sharded else None

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, shard.shape) for name, shard in self._weights.items()]

    def local(self) -> dict[str, Tensor]:
        """This rank's part of each weight."""
        return {name: shard.local for name, shard in self._weights.items()}

    def gather(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors from `parts`, one after another, on rank 0; empty ones elsewhere. Collective when sharded."""
        for name, shard in self._weights.items():
            mine = parts[name].detach()
            if self._group is None:
                yield name, mine if self._rank == 0 else mine.new_empty(0)
                continue
            rows = self._rows(shard.shape[0])
            padded = mine.new_zeros((rows, *shard.shape[1:]))
            padded[: len(mine)] = mine
            found = [torch.empty_like(padded) for _ in range(self._world)] if self._rank == 0 else None
            dist.gather(padded, found, dst=0, group=self._group)
            yield name, mine.new_empty(0) if found is None else torch.cat(found)[: shard.shape[0]]

    def load(self, tensors: Iterable[tuple[str, Tensor]], *, into: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of each whole tensor; raises `ModelError` unless exactly the weights' come."""
        missing = set(self._weights)
        for name, tensor in tensors:
            shard = self._weights.get(name)
            if shard is None:
                raise ModelError(f"the model has no weight {name}")
            if tuple(tensor.shape) != shard.shape:
                raise ModelError(f"{name} has the shape {tuple(tensor.shape)}, the model's is {shard.shape}")
            with torch.no_grad():
                into[name].copy_(self._part(tensor, shard.shape[0]))
            missing.discard(name)
        if missing:
            raise ModelError(f"{len(missing)} weights are missing, for example {min(missing)}")

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _part(self, tensor: Tensor, total: int) -> Tensor:
        if self._group is None:
            return tensor
        rows = self._rows(total)
        return tensor[self._rank * rows : (self._rank + 1) * rows]

    def _rows(self, total: int) -> int:
        return -(-total // self._world)


def _local(parameter: nn.Parameter) -> Tensor:
    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole
