"""The forward pass: `extend` adds prompts to the cache, `decode` adds one token to every running slot.

Tokens of different sequences are packed without padding; only attention distinguishes sequences. Their keys and values
are in `KVCache`, one tensor for each layer that grows as needed. A slot holds one sequence; the data of each token are
contiguous. Slots in use are always the first ones, so that a decode step reads plain slices of these tensors.

The engine supports a subset of a model's `config.json`: any setting that would change the computation in an unsupported
way is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from streamrl import architecture
from streamrl.architecture import MODEL_TYPES, ROPE_TYPES, Architecture, Rope
from streamrl.errors import ModelError
from streamrl.gserver.embedded.adapters import Adapter, MatrixAdapter, rows_of
from streamrl.gserver.embedded.weights import LayerWeights, MlpWeights, Parameters, SparseMlpWeights
from streamrl.models import check_checkpoint
from streamrl.native.operations import Attend, RotateAndStore, SlotSpan, operations_for, product, silu_and_multiply
from streamrl.types import NO_EXPERT


class Unsupported(ModelError):
    """The fast engine does not compute this model."""


def read_architecture(folder: Path) -> Architecture:
    """Read `folder/config.json`; raises `Unsupported`, which names the unsupported settings, or `ModelError`."""
    settings = check_checkpoint(folder)
    if settings["model_type"] not in MODEL_TYPES:
        raise Unsupported(
            f"the fast embedded engine computes no models of type {settings['model_type']!r}, only "
            f"{', '.join(MODEL_TYPES)}"
        )
    found = architecture.read_architecture(folder)
    problems = []
    if settings.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act = {settings['hidden_act']!r} (supported: silu)")
    if settings.get("mlp_bias"):
        problems.append("mlp_bias = true")
    if settings.get("use_sliding_window"):
        problems.append("use_sliding_window = true")
    if settings.get("quantization_config"):
        problems.append("quantized weights")
    if found.rope.kind not in ROPE_TYPES:
        problems.append(f"rope {_rope_settings(settings)} (supported rope types: {', '.join(ROPE_TYPES)})")
    if problems:
        raise Unsupported(f"the fast embedded engine cannot compute {folder}: {', '.join(problems)} is not supported")
    return found


def _rope_settings(settings: dict[str, Any]) -> Any:
    return settings.get("rope_parameters") or settings.get("rope_scaling")


def rotation_table(rope: Rope, head_dim: int, length: int) -> Tensor:
    """Return the rotation at each of `length` positions: cosines, and sines with the sign for exchanged halves of a
    head, `[2, length, head_dim]`, float32."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return radians per position of each pair of numbers: `[head_dim / 2]`, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretched(rope, frequencies)
    return frequencies


def _stretched(rope: Rope, frequencies: Tensor) -> Tensor:
    """Scale as Llama 3.1 does: low frequencies are divided by `factor`, high ones stay, a ramp is in between."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    ramp = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - ramp) * frequencies / rope.factor + ramp * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), between, stretched)


FIRST_SLOTS = 8
FIRST_LENGTH = 128


class Extension(msgspec.Struct, frozen=True):
    """New tokens of one slot, after `cached` tokens that the cache holds already."""

    slot: int
    cached: int
    tokens: Sequence[int]
    last: int | None = None
    """Number of last tokens whose hidden states are wanted; None: all."""
    adapter: Adapter | None = None
    """The adapter that computes them."""

    @property
    def wanted(self) -> int:
        """Number of its tokens whose hidden states are returned."""
        return len(self.tokens) if self.last is None else min(self.last, len(self.tokens))


class StepModel(Protocol):
    """A model as the scheduler uses it; `Model` documents the methods."""

    parameters: Parameters

    def extend(self, extensions: Sequence[Extension]) -> tuple[Tensor, list[int]]: ...

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], *, adapters: Sequence[Adapter | None] = ()
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Model:
    """Computes with `parameters`, which may be replaced by others of the same shape, dtype and device, on `cache`."""

    def __init__(
        self,
        parameters: Parameters,
        cache: KVCache,
        *,
        max_length: int,
        copies_cache: bool = False,
        native: bool = True,
    ) -> None:
        """`max_length`: longest sequence, in tokens. `copies_cache`: see `TorchOperations`. `native`: compute in C
        where it is faster."""
        self.parameters = parameters
        self.cache = cache
        self._a: Architecture = parameters.architecture
        self._device = parameters.device
        self._operations = operations_for(
            heads=self._a.heads,
            kv_heads=self._a.kv_heads,
            head_dim=self._a.head_dim,
            eps=self._a.rms_norm_eps,
            rotation=rotation_table(self._a.rope, self._a.head_dim, max_length),
            dtype=parameters.compute_dtype,
            device=self._device,
            copies_cache=copies_cache,
            native=native,
        )

    def extend(self, extensions: Sequence[Extension]) -> tuple[Tensor, list[int]]:
        """Compute the tokens of `extensions` and write their keys and values to the cache.

        Returns the hidden states of the wanted tokens, packed (`[wanted, hidden_size]`), and the first row of each
        extension. Extensions are best passed sorted by (cached, new) lengths: torch computes attention for neighbours
        of equal lengths together.
        """
        starts: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        for extension in extensions:
            starts.append(len(wanted))
            tokens.extend(extension.tokens)
            positions.extend(range(extension.cached, extension.cached + len(extension.tokens)))
            slots.extend([extension.slot] * len(extension.tokens))
            wanted.extend(range(len(tokens) - extension.wanted, len(tokens)))
        place = torch.tensor([tokens, positions, slots], device=self._device)
        pieces = [SlotSpan(extension.slot, extension.cached, len(extension.tokens)) for extension in extensions]
        adapters = [e.adapter for e in extensions for _ in e.tokens] if any(e.adapter for e in extensions) else ()
        attend = self._operations.attend(place[2], place[1], pieces)
        if len(wanted) == len(tokens):
            return self._forward(place, attend, adapters=adapters), starts
        return self._forward(place, attend, adapters=adapters, wanted=wanted), starts

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], *, adapters: Sequence[Adapter | None] = ()
    ) -> Tensor:
        """Compute `tokens[i]` at `positions[i]` of slot i, with `adapters[i]` if there are any; return the logits after
        it, `[n, vocab]`."""
        place = torch.tensor([tokens, positions, range(len(tokens))], device=self._device)
        pieces = [SlotSpan(slot, position, 1) for slot, position in enumerate(positions)]
        attend = self._operations.attend(place[2], place[1], pieces)
        return self.logits(self._forward(place, attend, adapters=adapters))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of `hidden` (`[n, hidden_size]`): `[n, vocab]`, in the compute dtype."""
        return self.parameters.head(self._operations.rms_norm(hidden, self.parameters.norm))

    def _forward(
        self,
        place: Tensor,
        attend: Attend,
        *,
        adapters: Sequence[Adapter | None] = (),
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the hidden states of the `wanted` tokens; after its attention, the last layer computes these alone.

        `place`: `[3, tokens]`, the tokens, their positions and their slots. `attend`: their attention. `adapters`: one
        for each token, or empty.
        """
        tokens, positions, slots = place.unbind()
        rows = self.cache.rows(slots, positions)
        rotate_and_store: RotateAndStore = self._operations.rotate_and_store(positions, rows)
        routes = self.cache.routes_of(rows)
        x = self.parameters.embedding.index_select(0, tokens)
        last = self._a.layers - 1
        adapted = rows_of(adapters, device=self._device)
        for i, layer in enumerate(self.parameters.layers):
            qkv = self._queries_keys_values(layer, x, [(adapter.layers[i].qkv, rows) for adapter, rows in adapted])
            rotate_and_store(qkv, self.cache.layers[i])
            attended = attend(qkv, self.cache.layers[i])
            if i == last and wanted is not None:
                chosen = torch.tensor(wanted, dtype=torch.long, device=self._device)
                x, attended = x[chosen], attended[chosen]
                routes = routes.at(chosen)
                adapted = rows_of([adapters[row] for row in wanted] if adapters else (), device=self._device)
            x = layer.o(attended, layer.o_bias, added=x)
            _add([(adapter.layers[i].o, rows) for adapter, rows in adapted], x, attended)
            normed = self._operations.rms_norm(x, layer.post_norm)
            if isinstance(layer.mlp, SparseMlpWeights):
                x = self._add_experts(layer.mlp, x, normed, routes, i)
                continue
            gated = _gated(layer.mlp, normed, [(adapter.layers[i].gate_up, rows) for adapter, rows in adapted])
            x = layer.mlp.down(gated, added=x)
            _add([(adapter.layers[i].down, rows) for adapter, rows in adapted], x, gated)
        return x

    def _add_experts(self, w: SparseMlpWeights, x: Tensor, normed: Tensor, routes: Routes, layer: int) -> Tensor:
        """Return `x` (`[tokens, hidden_size]`) plus the outputs of the router's chosen experts for `normed`, which is
        `x` after its norm; record the chosen experts in `routes`."""
        moe = self._a.moe
        assert moe is not None
        if not len(x):
            return x
        probabilities = product(normed, w.router).softmax(-1, dtype=torch.float32)
        shares, chosen = probabilities.topk(moe.top_k, dim=-1)
        if moe.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        routes.note(layer, chosen)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // moe.top_k
        counts = chosen.flatten().bincount(minlength=moe.experts).tolist()
        parts = zip(w.experts, torch.split(normed[tokens], counts), strict=True)
        computed = torch.cat([expert.down(expert.gate_up.gated(part)) for expert, part in parts if len(part)])
        return x.index_add(0, tokens, computed * shares.to(x.dtype).flatten()[order, None])

    def _queries_keys_values(self, w: LayerWeights, x: Tensor, adapters: MatrixAdapters) -> Tensor:
        a = self._a
        normed = self._operations.rms_norm(x, w.input_norm)
        qkv = w.qkv(normed, w.qkv_bias)
        _add(adapters, qkv, normed)
        qkv = qkv.view(len(x), -1, a.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            queries, keys = qkv[:, : a.heads], qkv[:, a.heads : a.heads + a.kv_heads]
            queries.copy_(self._operations.rms_norm(queries, w.q_norm))
            keys.copy_(self._operations.rms_norm(keys, w.k_norm))
        return qkv


MatrixAdapters = Sequence[tuple[MatrixAdapter | None, Tensor | None]]
"""Adapters of one matrix, and the rows that each applies to."""


def _gated(w: MlpWeights, normed: Tensor, adapters: MatrixAdapters) -> Tensor:
    if not adapters:
        return w.gate_up.gated(normed)
    gate_up = w.gate_up.plain(normed)
    _add(adapters, gate_up, normed)
    return silu_and_multiply(gate_up)


def _add(adapters: MatrixAdapters, product: Tensor, x: Tensor) -> None:
    for adapter, rows in adapters:
        if adapter is not None:
            adapter.add(product, x, rows)


class Routes(NamedTuple):
    """Storage for the experts that compute some tokens."""

    kept: Tensor | None
    """`[all_tokens, layers, top_k]`; None: experts are not recorded."""
    rows: Tensor
    """`[tokens]`"""

    def at(self, chosen: Tensor) -> Routes:
        """Return the routes of the `chosen` tokens only."""
        return Routes(self.kept, self.rows[chosen])

    def note(self, layer: int, experts: Tensor) -> None:
        """Record `experts`, `[tokens, top_k]`."""
        if self.kept is not None:
            self.kept[self.rows, layer] = experts.to(torch.uint8)


class SlotCache(Protocol):
    """The cache of all slots as the scheduler uses it; `KVCache` documents the methods."""

    routes: Tensor | None

    @property
    def bytes(self) -> int: ...

    @property
    def token_bytes(self) -> int: ...

    def reserve(self, *, slots: int, length: int) -> None: ...

    def copy(self, source: int, targets: Sequence[int], length: int) -> None: ...

    def clear(self, slot: int) -> None: ...

    def take(self, slot: int, length: int) -> list[Tensor]: ...

    def put(self, slot: int, taken: Sequence[Tensor], length: int) -> None: ...


class SlotTensors:
    """Tensors `[slots, length, ...]` of all slots' tokens, which grow as needed; the base of caches."""

    routes: Tensor | None = None

    def __init__(self, *, max_slots: int, max_length: int, device: torch.device, spare: int = 0) -> None:
        """`spare`: slots behind all others, for rows that fill up a batch."""
        self._spare = spare
        self.slots = min(FIRST_SLOTS, max_slots)
        self.length = min(FIRST_LENGTH, max_length)
        self.max_slots = max_slots
        self._max_length = max_length
        self._device = device
        self.layers: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return sum(tensor.nbytes for tensor in self._kept())

    @property
    def token_bytes(self) -> int:
        """Memory of one token in all layers."""
        return sum(tensor[0, 0].nbytes for tensor in self._kept())

    def reserve(self, *, slots: int, length: int) -> None:
        """Make room for this many slots of this many tokens each. Sizes double, so that copies stay rare.

        Raises `RuntimeError` if there is not enough memory; the cache is then as before.
        """
        if slots <= self.slots and length <= self.length:
            return
        old_slots, old_length = self.slots, self.length
        while self.slots < slots:
            self.slots = min(2 * self.slots, self.max_slots)
        while self.length < length:
            self.length = min(2 * self.length, self._max_length)
        try:
            for i, old in enumerate(self.layers):
                self.layers[i] = self._empty(old.shape[2:], old.dtype)
                self.layers[i][:old_slots, :old_length] = old[:old_slots]
            self._grow_routes(old_slots, old_length)
        except RuntimeError:
            self._shrink(slots=old_slots, length=old_length)
            raise

    def _grow_routes(self, old_slots: int, old_length: int) -> None:
        """Make room in `routes`, if there are any."""

    def _shrink(self, *, slots: int, length: int) -> None:
        """Shrink the layers that have grown back to this size, since all must have the same size."""
        self.slots, self.length = slots, length
        for i in range(len(self.layers)):
            if self.layers[i].shape[:2] != (slots + self._spare, length):
                # By way of the host's memory, so that a GPU's memory is free before the copy is allocated.
                self.layers[i] = self.layers[i][: slots + self._spare, :length].to("cpu", copy=True)
                self.layers[i] = self.layers[i].to(self._device)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of a slot to others, given in ascending order."""
        for tensor in self._kept():
            kept = tensor[source, :length]
            for first, last in _spans(targets):
                tensor[first : last + 1, :length] = kept

    def clear(self, slot: int) -> None:
        """Overwrite possible NaNs in a slot with zeros, for the reason given in `_empty`."""
        for layer in self.layers:
            layer[slot].zero_()

    def take(self, slot: int, length: int) -> list[Tensor]:
        """Return a copy of the first `length` tokens of a slot, for `put`."""
        return [tensor[slot, :length].clone() for tensor in self._kept()]

    def put(self, slot: int, taken: Sequence[Tensor], length: int) -> None:
        """Copy the first `length` tokens of `taken`, which `take` returned, into a slot."""
        for tensor, kept in zip(self._kept(), taken, strict=True):
            tensor[slot, :length] = kept[:length]

    def _kept(self) -> list[Tensor]:
        """Return all tensors of tokens: `[slots, length, ...]`."""
        return self.layers if self.routes is None else [*self.layers, self.routes]

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Zeros, not garbage: masked positions are multiplied by 0, which does not remove a NaN.
        return torch.zeros((self.slots + self._spare, self.length, *shape), dtype=dtype, device=self._device)


class KVCache(SlotTensors):
    """Keys and values of all slots: `[slots, length, 2 * kv_heads, head_dim]` for each layer, keys in the first half
    of the heads; and the experts that computed each token."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        max_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: int = 0,
    ) -> None:
        super().__init__(max_slots=max_slots, max_length=max_length, device=device, spare=spare)
        shape = (2 * architecture.kv_heads, architecture.head_dim)
        self.layers = [self._empty(shape, dtype) for _ in range(architecture.layers)]
        moe = architecture.moe
        self._routes_shape = (architecture.layers, moe.top_k) if moe is not None and moe.experts <= NO_EXPERT else None
        self.routes = self._no_routes()
        """`[slots, length, layers, top_k]` uint8, `NO_EXPERT` for a token that none has computed; None: the model has
        no experts, or too many of them."""

    def _grow_routes(self, old_slots: int, old_length: int) -> None:
        if (routes := self._no_routes()) is not None and self.routes is not None:
            routes[:old_slots, :old_length] = self.routes
            self.routes = routes

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the row of token i, which is at `positions[i]` of `slots[i]`: `[tokens]`."""
        return slots * self.length + positions

    def routes_of(self, rows: Tensor) -> Routes:
        """Return the storage for the experts of the tokens in `rows` (`[tokens]`), which are about to be computed;
        earlier records there are erased."""
        if self.routes is None:
            return Routes(None, rows)
        kept = self.routes.flatten(0, 1)
        kept[rows] = NO_EXPERT
        return Routes(kept, rows)

    def _no_routes(self) -> Tensor | None:
        if self._routes_shape is None:
            return None
        shape = (self.slots, self.length, *self._routes_shape)
        return torch.full(shape, NO_EXPERT, dtype=torch.uint8, device=self._device)


def _spans(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending `slots` as (first, last) of each stretch without a gap."""
    spans: list[tuple[int, int]] = []
    for slot in slots:
        if spans and spans[-1][1] == slot - 1:
            spans[-1] = (spans[-1][0], slot)
        else:
            spans.append((slot, slot))
    return spans
