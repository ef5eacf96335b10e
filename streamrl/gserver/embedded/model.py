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
from streamrl.gserver.embedded.parameters import LayerWeights, Parameters

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""Layer number, queries `[tokens, heads, head_dim]`, keys then values `[tokens, 2 * kv_heads, head_dim]`
→ `[tokens, heads * head_dim]`."""


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
        self._rotation = _rotation_table(self._a, max_length).to(parameters.held_in).to(self._device)
        self._own_norm = self._device.type == "cpu" and parameters.held_in == torch.float32
        self._eps = torch.tensor(self._a.rms_norm_eps, device=self._device)
        self._places = torch.arange(max(max_length, cache.max_slots), device=self._device)

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
        rows = self.cache.rows(place[2], place[1])
        runs = _runs(extensions)

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            self.cache.write(layer, rows, keys_values)
            parts = [self._attend_run(layer, run, queries, keys_values) for run in runs]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        chosen = None if len(wanted) == len(tokens) else torch.tensor(wanted, dtype=torch.long, device=self._device)
        return self._forward(place[0], place[1], attend, wanted=chosen), starts

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits `[n, vocab]` after `tokens[i]`, which stands at `positions[i]` of slot i."""
        n = len(tokens)
        place = torch.tensor([tokens, positions], device=self._device)
        rows = self.cache.rows(self._places[:n], place[1])
        longest = max(positions) + 1
        mask = None
        if min(positions) + 1 < longest:
            hidden = self._places[:longest] > place[1][:, None]
            mask = torch.zeros(n, 1, 1, longest, dtype=self.parameters.held_in, device=self._device)
            mask.masked_fill_(hidden[:, None, None], float("-inf"))
        a = self._a

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            self.cache.write(layer, rows, keys_values)
            keys, values = self._heads(self.cache.layers[layer][:n, :longest])
            queries = queries.view(n, a.kv_heads, self._groups, a.head_dim)
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).reshape(n, -1)

        return self.logits(self._forward(place[0], place[1], attend))

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, vocab]` in the dtype that is computed in."""
        return self.parameters.head(self._norm(hidden, self.parameters.norm))

    def _forward(self, tokens: Tensor, positions: Tensor, attend: Attend, *, wanted: Tensor | None = None) -> Tensor:
        """Hidden states of the `wanted` tokens: the last layer ends with these alone."""
        x = self.parameters.embedding.index_select(0, tokens)
        cos, sin = self._rotation[:, positions, None].unbind()
        last = self._a.layers - 1
        for i, layer in enumerate(self.parameters.layers):
            attended = self._attended(i, layer, x, cos, sin, attend)
            if i == last and wanted is not None:
                x, attended = x[wanted], attended[wanted]
            x = layer.o(attended, layer.o_bias).add_(x)
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, -1)
            x = layer.down(F.silu(gate).mul_(up)).add_(x)
        return x

    def _attended(self, i: int, w: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """What layer i attends to, before its output projection."""
        a = self._a
        normed = self._norm(x, w.input_norm)
        qkv = w.qkv(normed, w.qkv_bias).view(x.shape[0], -1, a.head_dim)
        turned = qkv[:, : a.heads + a.kv_heads]
        if w.q_norm is not None and w.k_norm is not None:
            turned.copy_(self._scaled(turned))
            turned[:, : a.heads].mul_(w.q_norm)
            turned[:, a.heads :].mul_(w.k_norm)
        # `sin` carries the sign of rotate_half, so that exchanged halves do for it.
        exchanged = torch.cat(turned.chunk(2, -1)[::-1], -1)
        turned.mul_(cos).addcmul_(exchanged, sin)
        return attend(i, qkv[:, : a.heads], qkv[:, a.heads :])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension; torch's own is slow on a CPU in float32."""
        return (
            self._scaled(x).mul_(weight)
            if self._own_norm
            else F.rms_norm(x, weight.shape, weight, self._a.rms_norm_eps)
        )

    def _scaled(self, x: Tensor) -> Tensor:
        """RMS norm without weights: a new tensor."""
        if self._own_norm:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x * torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return F.rms_norm(x, x.shape[-1:], None, self._a.rms_norm_eps)

    def _attend_run(self, layer: int, run: _Run, queries: Tensor, keys_values: Tensor) -> Tensor:
        a = self._a
        count, new, total = len(run.slots), run.new, run.cached + run.new
        span = slice(run.start, run.start + count * new)
        q = queries[span].view(count, new, a.heads, a.head_dim).transpose(1, 2)
        if run.cached == 0:
            held = keys_values[span].view(count, new, 2 * a.kv_heads, a.head_dim)
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


def _rotation_table(a: Architecture, max_length: int) -> Tensor:
    """Cosines, and sines signed for exchanged halves: `[2, max_length, head_dim]`, float32."""
    angles = torch.outer(torch.arange(max_length, dtype=torch.float32), a.rope.inverse_frequencies(a.head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))


def _runs(extensions: Sequence[Extension]) -> list[_Run]:
    runs: list[_Run] = []
    start = 0
    for (cached, new), run in groupby(extensions, key=lambda e: (e.cached, len(e.tokens))):
        slots = [extension.slot for extension in run]
        runs.append(_Run(start=start, slots=slots, cached=cached, new=new))
        start += len(slots) * new
    return runs
