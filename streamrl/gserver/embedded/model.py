"""The forward pass: `extend` adds prompts to the cache, `decode` adds one token to every running slot.

Tokens of different sequences are packed without padding; only attention knows sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from streamrl.gserver.embedded.architecture import Architecture
from streamrl.gserver.embedded.cache import KVCache
from streamrl.gserver.embedded.compiled import kernels_for
from streamrl.gserver.embedded.kernels import Turn
from streamrl.gserver.embedded.parameters import LayerWeights, Parameters

Attend = Callable[[int, Tensor], Tensor]
"""Layer number; queries, keys and values `[tokens, heads + 2 * kv_heads, head_dim]` → `[tokens, heads * head_dim]`."""


class Extension(msgspec.Struct, frozen=True):
    """New tokens of one slot, after `cached` tokens that the cache holds already."""

    slot: int
    cached: int
    tokens: Sequence[int]
    last: int | None = None
    """How many of the last tokens' hidden states are wanted; None: all."""

    @property
    def wanted(self) -> int:
        return len(self.tokens) if self.last is None else min(self.last, len(self.tokens))


class _Run(msgspec.Struct, frozen=True):
    """Extensions of equal lengths, next to each other in the packed tokens."""

    start: int
    slots: list[int]
    cached: int
    new: int


class Model:
    """Computes with `parameters` (of one shape, dtype and device; may be exchanged) on `cache`."""

    def __init__(self, parameters: Parameters, cache: KVCache, *, max_length: int, copies_cache: bool = False) -> None:
        """`copies_cache`: one-slot extensions attend to a copy of the cache that is laid out the same whatever the
        slot, because rounding may depend on where rows begin in memory."""
        self.parameters = parameters
        self.cache = cache
        self._a: Architecture = parameters.architecture
        self._device = parameters.device
        self._groups = self._a.heads // self._a.kv_heads
        self._copies_cache = copies_cache
        self._kernels = kernels_for(self._a, max_length=max_length, dtype=parameters.held_in, device=self._device)
        self._slots = torch.arange(cache.max_slots, device=self._device)

    def extend(self, extensions: Sequence[Extension]) -> tuple[Tensor, list[int]]:
        """Hidden states of the wanted tokens, packed, and where each extension's begin.

        Extensions are best passed sorted by (cached, new) lengths: neighbours of equal lengths are
        attended to together.
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
        turn = self._kernels.turn(place[1], self.cache.rows(place[2], place[1]))
        runs = _runs(extensions)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            parts = [self._attend_run(layer, run, qkv) for run in runs]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        chosen = None if len(wanted) == len(tokens) else torch.tensor(wanted, dtype=torch.long, device=self._device)
        return self._forward(place[0], turn, attend, wanted=chosen), starts

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits `[n, vocab]` after `tokens[i]`, which stands at `positions[i]` of slot i."""
        place = torch.tensor([tokens, positions], device=self._device)
        rows = self.cache.rows(self._slots[: len(tokens)], place[1])
        attend_slots = self._kernels.attend([position + 1 for position in positions])

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return attend_slots(qkv[:, : self._a.heads], self.cache.layers[layer])

        return self.logits(self._forward(place[0], self._kernels.turn(place[1], rows), attend))

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, vocab]` in the dtype that is computed in."""
        return self.parameters.head(self._kernels.rms_norm(hidden, self.parameters.norm))

    def _forward(self, tokens: Tensor, turn: Turn, attend: Attend, *, wanted: Tensor | None = None) -> Tensor:
        """Hidden states of the `wanted` tokens: the last layer ends with these alone."""
        x = self.parameters.embedding.index_select(0, tokens)
        last = self._a.layers - 1
        for i, layer in enumerate(self.parameters.layers):
            qkv = self._queries_keys_values(layer, x)
            turn(qkv, self.cache.layers[i])
            attended = attend(i, qkv)
            if i == last and wanted is not None:
                x, attended = x[wanted], attended[wanted]
            x = layer.o(attended, layer.o_bias).add_(x)
            gate_up = layer.gate_up(self._kernels.rms_norm(x, layer.post_norm))
            x = layer.down(self._kernels.silu_times(gate_up)).add_(x)
        return x

    def _queries_keys_values(self, w: LayerWeights, x: Tensor) -> Tensor:
        a = self._a
        qkv = w.qkv(self._kernels.rms_norm(x, w.input_norm), w.qkv_bias).view(len(x), -1, a.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            queries, keys = qkv[:, : a.heads], qkv[:, a.heads : a.heads + a.kv_heads]
            queries.copy_(self._kernels.rms_norm(queries, w.q_norm))
            keys.copy_(self._kernels.rms_norm(keys, w.k_norm))
        return qkv

    def _attend_run(self, layer: int, run: _Run, qkv: Tensor) -> Tensor:
        a = self._a
        count, new, total = len(run.slots), run.new, run.cached + run.new
        span = slice(run.start, run.start + count * new)
        q = qkv[span, : a.heads].view(count, new, a.heads, a.head_dim).transpose(1, 2)
        if run.cached == 0:
            held = qkv[span, a.heads :].view(count, new, 2 * a.kv_heads, a.head_dim)
        else:
            kept = self.cache.layers[layer]
            held = kept[run.slots[0], None, :total] if count == 1 else kept[run.slots, :total]
            if self._copies_cache:
                held = held.clone(memory_format=torch.contiguous_format)
        mask = None
        if run.cached and new > 1:
            mask = torch.ones(new, total, dtype=torch.bool, device=self._device).tril(run.cached)
        keys, values = self._heads(held)
        attended = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=not run.cached, enable_gqa=self._groups > 1
        )
        return attended.transpose(1, 2).reshape(count * new, -1)

    def _heads(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each `[slots, kv_heads, length, head_dim]`, of cache rows `[slots, length, ...]`."""
        heads = held.transpose(1, 2)
        return heads[:, : self._a.kv_heads], heads[:, self._a.kv_heads :]


def _runs(extensions: Sequence[Extension]) -> list[_Run]:
    runs: list[_Run] = []
    start = 0
    for (cached, new), run in groupby(extensions, key=lambda e: (e.cached, len(e.tokens))):
        slots = [extension.slot for extension in run]
        runs.append(_Run(start=start, slots=slots, cached=cached, new=new))
        start += len(slots) * new
    return runs
