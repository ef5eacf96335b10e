"""The forward pass: `extend` adds prompts to the cache, `decode` adds one token to every running slot.

Tokens of different sequences are packed without padding; only attention knows sequences. Their keys and values lie in
`KVCache`, one tensor for each layer that grows as needed. A slot holds one sequence, all of a token next to each other.
Slots in use are always the first ones, so that a decode step reads plain slices of these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from streamrl.gserver.embedded.adapters import Adapter, MatrixAdapter, rows_of
from streamrl.gserver.embedded.architecture import Architecture
from streamrl.gserver.embedded.weights import LayerWeights, MlpWeights, Parameters, SparseMlpWeights
from streamrl.native.operations import Attend, Piece, RotateAndStore, operations_for, product, silu_and_multiply

FIRST_SLOTS = 8
FIRST_LENGTH = 128


class Extension(msgspec.Struct, frozen=True):
    """New tokens of one slot, after `cached` tokens that the cache holds already."""

    slot: int
    cached: int
    tokens: Sequence[int]
    last: int | None = None
    """How many of the last tokens' hidden states are wanted; None: all."""
    adapter: Adapter | None = None
    """With which they are computed."""

    @property
    def wanted(self) -> int:
        return len(self.tokens) if self.last is None else min(self.last, len(self.tokens))


class Model:
    """Computes with `parameters`, which may be replaced by others of the same shape, dtype and device, on `cache`."""

    def __init__(self, parameters: Parameters, cache: KVCache, *, max_length: int, copies_cache: bool = False) -> None:
        """`max_length`: of a sequence, in tokens. `copies_cache`: see `TorchOperations`."""
        self.parameters = parameters
        self.cache = cache
        self._a: Architecture = parameters.architecture
        self._device = parameters.device
        self._operations = operations_for(
            heads=self._a.heads,
            kv_heads=self._a.kv_heads,
            head_dim=self._a.head_dim,
            eps=self._a.rms_norm_eps,
            rotation=self._a.rope.table(self._a.head_dim, max_length),
            dtype=parameters.compute_dtype,
            device=self._device,
            copies_cache=copies_cache,
        )

    def extend(self, extensions: Sequence[Extension]) -> tuple[Tensor, list[int]]:
        """Compute the tokens of `extensions` and write their keys and values to the cache.

        Returns the hidden states of the wanted tokens, packed (`[wanted, hidden_size]`), and where each extension's
        begin. Extensions are best passed sorted by (cached, new) lengths: torch attends to neighbours of equal lengths
        together.
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
        pieces = [Piece(extension.slot, extension.cached, len(extension.tokens)) for extension in extensions]
        adapters = [e.adapter for e in extensions for _ in e.tokens] if any(e.adapter for e in extensions) else ()
        if len(wanted) == len(tokens):
            return self._forward(place, pieces, adapters=adapters), starts
        return self._forward(place, pieces, adapters=adapters, wanted=wanted), starts

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], *, adapters: Sequence[Adapter | None] = ()
    ) -> Tensor:
        """Compute `tokens[i]`, which stands at `positions[i]` of slot i, with `adapters[i]`, if there are any; return
        the logits after it, `[n, vocab]`."""
        place = torch.tensor([tokens, positions, range(len(tokens))], device=self._device)
        pieces = [Piece(slot, position, 1) for slot, position in enumerate(positions)]
        return self.logits(self._forward(place, pieces, adapters=adapters))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of `hidden` (`[n, hidden_size]`): `[n, vocab]`, in the dtype that is computed in."""
        return self.parameters.head(self._operations.rms_norm(hidden, self.parameters.norm))

    def _forward(
        self,
        place: Tensor,
        pieces: Sequence[Piece],
        *,
        adapters: Sequence[Adapter | None] = (),
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the hidden states of the `wanted` tokens; the last layer ends with these alone.

        `place`: `[3, tokens]`, the tokens, their positions and their slots. `adapters`: of each token, if there are
        any.
        """
        tokens, positions, slots = place.unbind()
        rotate_and_store: RotateAndStore = self._operations.rotate_and_store(
            positions, self.cache.rows(slots, positions)
        )
        attend: Attend = self._operations.attend(slots, positions, pieces)
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
                adapted = rows_of([adapters[row] for row in wanted] if adapters else (), device=self._device)
            x = layer.o(attended, layer.o_bias, added=x)
            _add([(adapter.layers[i].o, rows) for adapter, rows in adapted], x, attended)
            normed = self._operations.rms_norm(x, layer.post_norm)
            if isinstance(layer.mlp, SparseMlpWeights):
                x = self._add_experts(layer.mlp, x, normed)
                continue
            gated = _gated(layer.mlp, normed, [(adapter.layers[i].gate_up, rows) for adapter, rows in adapted])
            x = layer.mlp.down(gated, added=x)
            _add([(adapter.layers[i].down, rows) for adapter, rows in adapted], x, gated)
        return x

    def _add_experts(self, w: SparseMlpWeights, x: Tensor, normed: Tensor) -> Tensor:
        """Return `x` plus what the experts that the router chooses for each token of `normed` make of it, which is
        `[tokens, hidden_size]`."""
        moe = self._a.moe
        assert moe is not None
        if not len(x):
            return x
        probabilities = product(normed, w.router).softmax(-1, dtype=torch.float32)
        shares, chosen = probabilities.topk(moe.top_k, dim=-1)
        if moe.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
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
"""Adapters of one matrix, and the rows that they are of."""


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


class KVCache:
    """Keys and values of all slots: `[slots, length, 2 * kv_heads, head_dim]` for each layer, keys in the first half
    of the heads."""

    def __init__(
        self, architecture: Architecture, *, max_slots: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots = min(FIRST_SLOTS, max_slots)
        self.length = min(FIRST_LENGTH, max_length)
        self.max_slots = max_slots
        self._max_length = max_length
        self._kv_heads = architecture.kv_heads
        self._head_dim = architecture.head_dim
        self._dtype = dtype
        self._device = device
        self.layers = [self._empty() for _ in range(architecture.layers)]

    @property
    def bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Memory of one token in all layers."""
        return sum(2 * self._kv_heads * self._head_dim * layer.element_size() for layer in self.layers)

    def reserve(self, *, slots: int, length: int) -> None:
        """Make room for so many slots of so many tokens. Sizes double, so that copies stay rare."""
        if slots <= self.slots and length <= self.length:
            return
        old_slots, old_length = self.slots, self.length
        while self.slots < slots:
            self.slots = min(2 * self.slots, self.max_slots)
        while self.length < length:
            self.length = min(2 * self.length, self._max_length)
        for i, old in enumerate(self.layers):
            self.layers[i] = self._empty()
            self.layers[i][:old_slots, :old_length] = old

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the row of token i, which is at `positions[i]` of `slots[i]`: `[tokens]`."""
        return slots * self.length + positions

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of a slot to others, given in ascending order."""
        for layer in self.layers:
            kept = layer[source, :length]
            for first, last in _spans(targets):
                layer[first : last + 1, :length] = kept

    def take(self, slot: int, length: int) -> list[Tensor]:
        """Return a copy of the first `length` tokens of a slot: `[length, 2 * kv_heads, head_dim]` for each layer."""
        return [layer[slot, :length].clone() for layer in self.layers]

    def put(self, slot: int, taken: Sequence[Tensor], length: int) -> None:
        """Copy the first `length` tokens of what `take` returned into a slot."""
        for layer, kept in zip(self.layers, taken, strict=True):
            layer[slot, :length] = kept[:length]

    def _empty(self) -> Tensor:
        # Zeros, not garbage: masked positions are multiplied by 0, which does not remove a NaN.
        shape = (self.slots, self.length, 2 * self._kv_heads, self._head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def _spans(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending `slots` as (first, last) of each stretch without a gap."""
    spans: list[tuple[int, int]] = []
    for slot in slots:
        if spans and spans[-1][1] == slot - 1:
            spans[-1] = (spans[-1][0], slot)
        else:
            spans.append((slot, slot))
    return spans
