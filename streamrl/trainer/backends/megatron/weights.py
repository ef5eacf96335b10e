"""The mapping between Hugging Face weights and each rank's Megatron parameters; gathering of whole tensors from their
shards, and the reverse.

Megatron fuses query, key and value, and gate and up; cuts the fused tensors over the tensor ranks; numbers layers from
0 in each pipeline stage; and pads the vocabulary to a multiple of the tensor ranks. A tied embedding is on the first
stage and, as a copy, on the last. The mapping is pure.

Gathered parameters travel point to point, directly from the ranks that hold them to rank 0, one after another, on a
separate communicator.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.device import SideStream
from streamrl.errors import ModelError
from streamrl.safetensors_files import TensorBox
from streamrl.trainer.backends.base import SCORE, Head
from streamrl.trainer.backends.megatron.shape import ModelShape
from streamrl.trainer.layout import Layout

# --- names ---

EMBEDDING = "model.embed_tokens.weight"


class Block(NamedTuple):
    """Some rows of a shard, and their box in a whole tensor."""

    source: int
    """Index of the whole tensor among the parameter's tensors."""
    start: tuple[int, ...]
    """Start of the box in the tensor."""
    size: tuple[int, ...]


class Cut(Protocol):
    """The division of whole tensors into one shard for each tensor rank."""

    @property
    def parallel_dim(self) -> int | None:
        """The dimension of the shard along which tensor ranks differ; None if all hold the same."""

    def blocks(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> list[Block]:
        """Return the blocks of the shard of tensor rank `rank` of `size`, from its first row on; `shapes`: of the whole
        tensors."""


class ReplicatedWeight(msgspec.Struct, frozen=True):
    """Whole tensors, one after another, on every rank."""

    parallel_dim: int | None = None

    def blocks(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> list[Block]:
        return [Block(source, (0,) * len(shape), shape) for source, shape in enumerate(shapes)]


class Columns(msgspec.Struct, frozen=True):
    """One tensor, cut along its second dimension."""

    parallel_dim: int | None = 1

    def blocks(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> list[Block]:
        rows, columns = shapes[0]
        return [Block(0, (0, rank * (columns // size)), (rows, columns // size))]


class Vocabulary(msgspec.Struct, frozen=True):
    """One tensor, cut along its rows after padding with zero rows to a multiple of the tensor ranks."""

    parallel_dim: int | None = 0

    def blocks(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> list[Block]:
        rows, columns = shapes[0]
        each = -(-rows // size)
        return [Block(0, (rank * each, 0), (max(0, min(each, rows - rank * each)), columns))]


class StackedWeight(msgspec.Struct, frozen=True):
    """Gate and up: each cut along its rows; a rank's parts follow each other."""

    parallel_dim: int | None = 0

    def blocks(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> list[Block]:
        return [
            Block(source, (rank * (rows // size), 0), (rows // size, columns))
            for source, (rows, columns) in enumerate(shapes)
        ]


class QueryGroups(msgspec.Struct, frozen=True):
    """Query, key and value rows, group by group: the group's query heads, its key head, its value head."""

    groups: int
    parallel_dim: int | None = 0

    def blocks(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> list[Block]:
        mine = self.groups // size
        return [
            Block(source, (group * (rows // self.groups), *(0,) * len(columns)), (rows // self.groups, *columns))
            for group in range(rank * mine, (rank + 1) * mine)
            for source, (rows, *columns) in enumerate(shapes)
        ]


class Weight(msgspec.Struct, frozen=True):
    """One Megatron parameter of one pipeline stage."""

    parameter: str
    """Name of the parameter in the stage's module."""
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    """Hugging Face name and whole shape of each tensor in the parameter."""
    cut: Cut
    copy: bool = False
    """Whether another stage holds the original; a copy is loaded, but never gathered."""
    share: int | None = None
    """Index of the parameter's share of a layer's experts, which is whole on the ranks that have it
    (`Layout.expert_rank`). None if the parameter belongs to no expert; then all ranks of the stage have a part."""

    def is_held(self, layout: Layout, rank: int) -> bool:
        """Return whether `rank`, of the parameter's stage, holds a part."""
        return self.share is None or self.share == layout.expert_rank(rank)

    def replica(self, layout: Layout, rank: int) -> tuple[int, int] | None:
        """Return how many ranks hold the same part as `rank`, and the index of `rank` among them. Return None if `rank`
        contributes no part, because it has none or the same as tensor rank 0."""
        place = layout.coordinates(rank)
        if not self.is_held(layout, rank):
            return None
        if self.share is not None:
            return layout.stage // layout.expert, rank % layout.stage // layout.expert
        if self.cut.parallel_dim is None and place.tensor:
            return None
        return layout.data * layout.context, place.data * layout.context + place.context

    def blocks(self, rank: int, size: int) -> list[Block]:
        """Return the blocks of the shard of tensor rank `rank` of `size`, from its first row on."""
        return self.cut.blocks([shape for _, shape in self.sources], rank, size)

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of each of `size` shards."""
        blocks = self.blocks(0, size)  # the first shard is never padded
        return (sum(block.size[0] for block in blocks), *blocks[0].size[1:])

    def split(self, wholes: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the shard of tensor rank `rank` of `size`."""
        shard = wholes[0].new_zeros(self.shard_shape(size))
        for block, rows in self._rows(rank, size):
            shard[rows] = wholes[block.source][_box(block)]
        return shard

    def join(self, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face names and whole tensors, from the shards by tensor rank."""
        wholes = [shards[0].new_empty(shape) for _, shape in self.sources]
        for rank, shard in enumerate(shards):
            for block, rows in self._rows(rank, len(shards)):
                wholes[block.source][_box(block)] = shard[rows]
        for (name, _), whole in zip(self.sources, wholes, strict=True):
            yield name, whole

    def parts(self, flat: Tensor, first: int, *, rank: int, size: int) -> Iterator[TensorBox]:
        """Yield the elements `flat` of the flattened shard of tensor rank `rank` as parts of whole tensors; `first` is
        the index of `flat[0]` in the shard."""
        begin = 0
        for block in self.blocks(rank, size):
            length = math.prod(block.size)
            low, high = max(first, begin), min(first + len(flat), begin + length)
            name, shape = self.sources[block.source]
            for at, start, box in _boxes(block.size, low - begin, high - begin):
                values = flat[begin + at - first :][: math.prod(box)].view(box)
                yield TensorBox(name, shape, tuple(a + b for a, b in zip(block.start, start, strict=True)), values)
            begin += length

    def _rows(self, rank: int, size: int) -> Iterator[tuple[Block, slice]]:
        """Yield each block with its rows in the shard."""
        row = 0
        for block in self.blocks(rank, size):
            yield block, slice(row, row + block.size[0])
            row += block.size[0]


def _box(block: Block) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(block.start, block.size, strict=True))


def _boxes(size: tuple[int, ...], low: int, high: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the elements from `low` to `high` of a flattened vector or matrix as boxes: the index of the first element
    of each, the start of the box, and its size."""
    if low >= high:
        return
    if len(size) == 1:
        yield low, (low,), (high - low,)
        return
    _, columns = size
    while low < high:
        row, column = divmod(low, columns)
        if column or high - low < columns:  # part of a row
            count = min(columns - column, high - low)
            yield low, (row, column), (1, count)
        else:
            rows = (high - low) // columns
            count = rows * columns
            yield low, (row, 0), (rows, columns)
        low += count


def stage_weights(shape: ModelShape, head: Head, *, stage: int, layout: Layout) -> list[Weight]:
    """Return all parameters of the ranks of pipeline stage `stage`, in an order near the order of transformers."""
    stages = layout.pipeline
    embedding = (EMBEDDING, (shape.vocab_size, shape.hidden_size))
    vocabulary = Vocabulary()
    weights = []
    if stage == 0:
        weights.append(Weight("embedding.word_embeddings.weight", (embedding,), vocabulary))
    each = shape.layers // stages
    for local in range(each):
        weights += _layer_weights(shape, local, stage * each + local, layout=layout)
    if stage < stages - 1:
        return weights
    weights.append(
        Weight("decoder.final_layernorm.weight", (("model.norm.weight", (shape.hidden_size,)),), ReplicatedWeight())
    )
    if head == "scalar":
        weights.append(Weight("score.weight", ((SCORE, (1, shape.hidden_size)),), ReplicatedWeight()))
    elif not shape.tied:
        weights.append(Weight("output_layer.weight", (("lm_head.weight", embedding[1]),), vocabulary))
    elif stages > 1:
        weights.append(Weight("output_layer.weight", (embedding,), vocabulary, copy=True))
    return weights


def _layer_weights(shape: ModelShape, local: int, number: int, *, layout: Layout) -> Iterator[Weight]:
    """Yield the weights of layer `number` of the model, which has the number `local` in its stage."""
    megatron, theirs = f"decoder.layers.{local}.", f"model.layers.{number}."
    hidden, d = shape.hidden_size, shape.head_dim
    rows = {"q": shape.heads * d, "k": shape.kv_heads * d, "v": shape.kv_heads * d}
    groups = QueryGroups(groups=shape.kv_heads)
    attention, own = f"{megatron}self_attention.", f"{theirs}self_attn."
    yield Weight(
        f"{attention}linear_qkv.weight", tuple((f"{own}{x}_proj.weight", (n, hidden)) for x, n in rows.items()), groups
    )
    if shape.qkv_bias:
        yield Weight(
            f"{attention}linear_qkv.bias", tuple((f"{own}{x}_proj.bias", (n,)) for x, n in rows.items()), groups
        )
    yield Weight(f"{attention}linear_proj.weight", ((f"{own}o_proj.weight", (hidden, rows["q"])),), Columns())
    if shape.qk_norm:
        for x in "qk":
            yield Weight(f"{attention}{x}_layernorm.weight", ((f"{own}{x}_norm.weight", (d,)),), ReplicatedWeight())
    if shape.moe is not None and number in shape.moe.layers:
        each = shape.moe.experts // layout.expert
        for expert in range(shape.moe.experts):
            share, place = divmod(expert, each)
            yield from _feed_forward(
                f"{megatron}mlp.experts.local_experts.{place}.",
                f"{theirs}mlp.experts.{expert}.",
                (shape.moe.intermediate_size, hidden),
                share=share,
            )
        yield Weight(
            f"{megatron}mlp.router.weight",
            ((f"{theirs}mlp.gate.weight", (shape.moe.experts, hidden)),),
            ReplicatedWeight(),
        )
    else:
        yield from _feed_forward(f"{megatron}mlp.", f"{theirs}mlp.", (shape.intermediate_size, hidden))
    for norm, name in (("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "post_attention_layernorm")):
        yield Weight(f"{megatron}{norm}.weight", ((f"{theirs}{name}.weight", (hidden,)),), ReplicatedWeight())


def _feed_forward(megatron: str, theirs: str, shape: tuple[int, int], *, share: int | None = None) -> Iterator[Weight]:
    """Yield the weights of a feed-forward block; `shape`: shape of its gate, `(inner, hidden)`."""
    gate_up = tuple((f"{theirs}{x}_proj.weight", shape) for x in ("gate", "up"))
    down = ((f"{theirs}down_proj.weight", shape[::-1]),)
    rows, columns = (StackedWeight(), Columns()) if share is None else (ReplicatedWeight(), ReplicatedWeight())
    yield Weight(f"{megatron}linear_fc1.weight", gate_up, rows, share=share)
    yield Weight(f"{megatron}linear_fc2.weight", down, columns, share=share)


def whole_shapes(stages: Sequence[Sequence[Weight]]) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every tensor by Hugging Face name, tied ones once, in the order of transformers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weights in stages:
        pending: dict[str, tuple[int, ...]] = {}
        for weight in weights:
            sources = () if weight.copy else weight.sources
            if weight.parameter.endswith("linear_qkv.bias"):
                pairs = zip(pending.items(), sources, strict=True)  # each bias follows its weight, as in the modules
                pending = dict(item for pair in pairs for item in pair)
            else:
                shapes |= pending
                pending = dict(sources)
        shapes |= pending
    return shapes


# --- whole tensors ---

Piece = Callable[[int], Tensor]
"""Map the number of a parameter of this stage to the elements that this rank contributes, flat, float32."""
Store = Callable[[int, Tensor], None]
"""Store the shard of a parameter of this stage."""


class WholeTensors:
    """The exchange of whole tensors between the ranks of one model."""

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
        """`stages`: parameters of each pipeline stage; `ranges`: range of elements that this rank contributes, for each
        parameter of its own stage.

        Collective over `group`, which contains all ranks.
        """
        self._stages = stages
        self._layout = layout
        self._rank = rank
        self._device = device
        self._group = group
        self._stage = layout.coordinates(rank).pipeline
        self.shapes = whole_shapes(stages)
        """Shapes of all tensors of the model by name, in order."""
        self._beside = SideStream(device)
        table = torch.zeros(max(len(weights) for weights in stages), 2, dtype=torch.int64)
        for number, range_ in enumerate(ranges):
            table[number] = torch.tensor(range_)
        tables = [torch.empty_like(table) for _ in range(layout.world)]
        dist.all_gather(tables, table, group=group)
        self._ranges: list[list[tuple[int, int]]] = [[tuple(row) for row in found.tolist()] for found in tables]

    def gather(self, piece: Piece, *, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield each whole tensor with its name, in order, as `dtype`, on rank 0; empty ones elsewhere. Collective."""
        order = iter(self.shapes)
        expected = next(order, None)
        ready: dict[str, Tensor] = {}
        for stage, weights in enumerate(self._stages):
            for number, weight in enumerate(weights):
                if weight.copy:
                    continue
                if self._rank == 0:
                    wholes = weight.join(self._receive(stage, number, weight, piece, dtype))
                    ready |= {name: whole.to(self._device) for name, whole in wholes}
                else:
                    if stage == self._stage:
                        self._send(number, piece, dtype)
                    ready |= {name: torch.empty(0, device=self._device) for name, _ in weight.sources}
                while expected in ready:
                    yield expected, ready.pop(expected)
                    expected = next(order, None)

    def scatter(self, wholes: Iterable[tuple[str, Tensor]], store: Store) -> None:
        """Pass this rank's shards of `wholes` to `store`.

        Raises `ModelError` if a tensor of the model is missing, unknown or of a wrong shape.
        """
        weights = self._stages[self._stage]
        takers: dict[str, list[int]] = {}
        for number, weight in enumerate(weights):
            for name, _ in weight.sources if weight.is_held(self._layout, self._rank) else ():
                takers.setdefault(name, []).append(number)
        waiting: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        missing = dict.fromkeys(self.shapes)
        for name, whole in wholes:
            if name not in self.shapes:
                raise ModelError(f"the model has no weight {name}")
            if tuple(whole.shape) != self.shapes[name]:
                raise ModelError(f"{name} has the shape {tuple(whole.shape)}; the model's has {self.shapes[name]}")
            missing.pop(name, None)
            for number in takers.get(name, ()):
                found = waiting[number]
                found[name] = whole
                sources = weights[number].sources
                if len(found) == len(sources):
                    tensor_rank = self._layout.coordinates(self._rank).tensor
                    ordered = [found[name] for name, _ in sources]
                    store(number, weights[number].split(ordered, tensor_rank, self._layout.tensor))
                    del waiting[number]
        if missing:
            raise ModelError(f"{len(missing)} weights are missing, the first of them {next(iter(missing))}")

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the name and shape of all tensors of the model."""
        return list(self.shapes.items())

    def parts(self, number: int, flat: Tensor, first: int = 0) -> Iterator[TensorBox]:
        """Return `flat` as parts of whole tensors; it contains the elements from number `first` on of a flattened
        parameter of this stage."""
        rank = self._layout.coordinates(self._rank).tensor
        yield from self._stages[self._stage][number].parts(flat, first, rank=rank, size=self._layout.tensor)

    def _receive(self, stage: int, number: int, weight: Weight, piece: Piece, dtype: torch.dtype) -> list[Tensor]:
        """Return the shards of one parameter, by tensor rank; only one if they are equal."""
        cuts = 1 if weight.cut.parallel_dim is None else self._layout.tensor
        shape = weight.shard_shape(cuts)
        shards, pending = [], []
        for cut in range(cuts):
            shard = torch.empty(shape, dtype=dtype)
            flat = shard.view(-1)
            for source in range(stage * self._layout.stage, (stage + 1) * self._layout.stage):
                if self._layout.coordinates(source).tensor % cuts != cut:
                    continue
                start, end = self._ranges[source][number]
                if start == end:
                    continue
                if source == self._rank:
                    flat[start:end] = self._on_host(piece, number, dtype)
                else:
                    pending.append(dist.irecv(flat[start:end], source, group=self._group))
            shards.append(shard)
        for work in pending:
            if work is not None:
                work.wait()
        return shards

    def _send(self, number: int, piece: Piece, dtype: torch.dtype) -> None:
        start, end = self._ranges[self._rank][number]
        if start < end:
            dist.send(self._on_host(piece, number, dtype), 0, group=self._group)

    def _on_host(self, piece: Piece, number: int, dtype: torch.dtype) -> Tensor:
        with self._beside.after_computation():
            return piece(number).to(device="cpu", dtype=dtype).contiguous()
