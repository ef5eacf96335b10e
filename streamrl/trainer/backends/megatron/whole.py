"""Whole tensors by Hugging Face name: gathered from their shards to rank 0, and cut into shards.

What is gathered travels point to point, straight from the ranks that hold it, one parameter after
another, on a communicator that serves nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.errors import ModelError
from streamrl.trainer.backends.megatron.names import Weight, whole_shapes
from streamrl.trainer.layout import Layout

Piece = Callable[[int], Tensor]
"""From the number of a parameter of this stage to the elements that this rank contributes, flat, float32."""
Store = Callable[[int, Tensor], None]
"""Takes over the shard of a parameter of this stage."""


class WholeTensors:
    """The exchange between the ranks of one model."""

    def __init__(
        self,
        stages: Sequence[Sequence[Weight]],
        *,
        layout: Layout,
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup,
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        """`stages`: parameters of each pipeline stage; `ranges`: which elements of each own one this rank contributes.

        Collective over `group`, which holds all ranks.
        """
        self._stages = stages
        self._layout = layout
        self._rank = rank
        self._device = device
        self._group = group
        self._stage = layout.coordinates(rank).pipeline
        self.shapes = whole_shapes(stages)
        """Of all tensors of the model by name, in order."""
        table = torch.zeros(max(len(weights) for weights in stages), 2, dtype=torch.int64, device=device)
        for number, range_ in enumerate(ranges):
            table[number] = torch.tensor(range_)
        tables = [torch.empty_like(table) for _ in range(layout.world)]
        dist.all_gather(tables, table, group=group)
        self._ranges: list[list[tuple[int, int]]] = [[tuple(row) for row in found.tolist()] for found in tables]

    def gather(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """Each whole tensor with its name, in order, on rank 0; empty ones elsewhere. Collective."""
        order = iter(self.shapes)
        expected = next(order, None)
        ready: dict[str, Tensor] = {}
        for stage, weights in enumerate(self._stages):
            for number, weight in enumerate(weights):
                if weight.copy:
                    continue
                if self._rank == 0:
                    ready |= weight.join(self._receive(stage, number, weight, piece))
                else:
                    if stage == self._stage:
                        self._send(number, piece)
                    ready |= {name: torch.empty(0, device=self._device) for name, _ in weight.sources}
                while expected in ready:
                    yield expected, ready.pop(expected)
                    expected = next(order, None)

    def scatter(self, wholes: Iterable[tuple[str, Tensor]], store: Store) -> None:
        """Hand the shards of `wholes` that this rank holds to `store`.

        Raises `ModelError` when a tensor of this stage is missing, or one is unknown or of a wrong shape.
        """
        weights = self._stages[self._stage]
        takers: dict[str, list[int]] = {}
        for number, weight in enumerate(weights):
            for name, _ in weight.sources:
                takers.setdefault(name, []).append(number)
        waiting: dict[int, dict[str, Tensor]] = {number: {} for number in range(len(weights))}
        for name, whole in wholes:
            self._check(name, whole)
            for number in takers.get(name, ()):
                found = waiting[number]
                found[name] = whole
                sources = weights[number].sources
                if len(found) == len(sources):
                    tensor_rank = self._layout.coordinates(self._rank).tensor
                    ordered = [found[name] for name, _ in sources]
                    store(number, weights[number].split(ordered, tensor_rank, self._layout.tensor))
                    del waiting[number]
        missing = [
            name for number, found in waiting.items() for name, _ in weights[number].sources if name not in found
        ]
        if missing:
            raise ModelError(f"{len(missing)} weights are missing, the first of them {missing[0]}")

    def own_names(self) -> list[str]:
        """Names of the tensors that this stage needs."""
        return list(dict.fromkeys(name for weight in self._stages[self._stage] for name, _ in weight.sources))

    def _check(self, name: str, whole: Tensor) -> None:
        if name not in self.shapes:
            raise ModelError(f"the model has no weight {name}")
        if tuple(whole.shape) != self.shapes[name]:
            raise ModelError(f"{name} has the shape {tuple(whole.shape)}; the model's has {self.shapes[name]}")

    def _receive(self, stage: int, number: int, weight: Weight, piece: Piece) -> list[Tensor]:
        """The shards of one parameter, by tensor rank."""
        shape = weight.shard_shape(self._layout.tensor)
        shards, pending = [], []
        for tensor_rank in range(self._layout.tensor):
            shard = torch.empty(shape, dtype=torch.float32, device=self._device)
            flat = shard.view(-1)
            for data_rank in range(self._layout.data):
                source = self._layout.rank(data=data_rank, tensor=tensor_rank, pipeline=stage)
                start, end = self._ranges[source][number]
                if start == end:
                    continue
                if source == self._rank:
                    flat[start:end] = piece(number)
                else:
                    pending.append(dist.irecv(flat[start:end], source, group=self._group))
            shards.append(shard)
        for work in pending:
            if work is not None:
                work.wait()
        return shards

    def _send(self, number: int, piece: Piece) -> None:
        start, end = self._ranges[self._rank][number]
        if start < end:
            dist.send(piece(number).float().contiguous(), 0, group=self._group)
