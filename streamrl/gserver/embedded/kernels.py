"""What the forward pass does besides matrix products, and how torch does it.

`compiled.py` does the same on a CPU in fewer passes over memory, where there is a C compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from streamrl.gserver.embedded.architecture import Architecture

Turn = Callable[[Tensor, Tensor], None]
Attend = Callable[[Tensor, Tensor], Tensor]


class Piece(msgspec.Struct, frozen=True):
    """New tokens of one slot, next to each other, after `cached` tokens that the cache holds already."""

    slot: int
    cached: int
    new: int


class Kernels(Protocol):
    """All for one model. A layer's cache is `[slots, length, 2 * kv_heads, head_dim]`, of the heads the first half
    keys; queries, keys and values of a token, `qkv`, are `[tokens, heads + 2 * kv_heads, head_dim]`."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """`[rows, width]`, or heads of tokens `[rows, heads, width]`, divided by the root of their mean squares, times
        `weight` (`[width]`): a new tensor."""

    def silu_times(self, gate_up: Tensor) -> Tensor:
        """`[rows, 2 * width]` → silu of the first half times the second, `[rows, width]`."""

    def turn(self, positions: Tensor, rows: Tensor) -> Turn:
        """For tokens at `positions`: a function that rotates queries and keys in a `qkv`, and writes keys and values to
        `rows` of a layer's cache, whose slots follow one another."""

    def attend(self, slots: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Attend:
        """For the tokens of `pieces`, which are at `positions` of `slots` (`[tokens]`): a function from a `qkv`, and a
        layer's cache that holds its keys and values, to what each token attends to, `[tokens, heads * head_dim]`."""


class TorchKernels:
    """`Kernels` of torch's operations, on any device."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        copies_cache: bool = False,
    ) -> None:
        """`copies_cache`: single pieces attend to a copy of the cache that is laid out the same whatever the slot,
        because rounding may depend on where rows begin in memory."""
        self._a = architecture
        self._copies_cache = copies_cache
        self._device = device
        self._rotation = rotation_table(architecture, max_length).to(dtype).to(device)
        self._own_norm = device.type == "cpu" and dtype == torch.float32
        self._eps = torch.tensor(architecture.rms_norm_eps, device=device)
        self._dtype = dtype

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self._own_norm:
            return F.rms_norm(x, weight.shape, weight, self._a.rms_norm_eps)
        # Torch's own is slow on a CPU in float32.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)

    def silu_times(self, gate_up: Tensor) -> Tensor:
        return silu_times(gate_up)

    def turn(self, positions: Tensor, rows: Tensor) -> Turn:
        cos, sin = self._rotation[:, positions, None].unbind()
        kept = 2 * self._a.kv_heads

        def turn(qkv: Tensor, layer: Tensor) -> None:
            turned = qkv[:, : self._a.heads + self._a.kv_heads]
            # `sin` carries the sign of rotate_half, so that exchanged halves do for it.
            exchanged = torch.cat(turned.chunk(2, -1)[::-1], -1)
            turned.mul_(cos).addcmul_(exchanged, sin)
            layer.flatten(0, 1).index_copy_(0, rows, qkv[:, -kept:])

        return turn

    def attend(self, slots: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> Attend:
        ones = [piece.new for piece in pieces] == [1] * len(pieces)
        if ones and not self._copies_cache and [piece.slot for piece in pieces] == list(range(len(pieces))):
            return self._attend_slots([piece.cached + 1 for piece in pieces])
        runs = _runs(pieces)

        def attend(qkv: Tensor, layer: Tensor) -> Tensor:
            parts = [self._attend_run(run, qkv, layer) for run in runs]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend

    def _attend_slots(self, lengths: Sequence[int]) -> Attend:
        """The last tokens of the first slots."""
        a, n, longest = self._a, len(lengths), max(lengths)
        mask = None
        if min(lengths) < longest:
            places = torch.arange(longest, device=self._device)
            hidden = places >= torch.tensor(lengths, device=self._device)[:, None]
            mask = torch.zeros(n, 1, 1, longest, dtype=self._dtype, device=self._device)
            mask.masked_fill_(hidden[:, None, None], float("-inf"))

        def attend(qkv: Tensor, layer: Tensor) -> Tensor:
            grouped = qkv[:, : a.heads].view(n, a.kv_heads, -1, a.head_dim)
            keys, values = self._heads(layer[:n, :longest])
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(n, -1)

        return attend

    def _attend_run(self, run: _Run, qkv: Tensor, layer: Tensor) -> Tensor:
        a = self._a
        count, new, total = len(run.slots), run.new, run.cached + run.new
        span = slice(run.start, run.start + count * new)
        q = qkv[span, : a.heads].view(count, new, a.heads, a.head_dim).transpose(1, 2)
        if run.cached == 0:
            held = qkv[span, a.heads :].view(count, new, 2 * a.kv_heads, a.head_dim)
        else:
            held = layer[run.slots[0], None, :total] if count == 1 else layer[run.slots, :total]
            if self._copies_cache:
                held = held.clone(memory_format=torch.contiguous_format)
        mask = None
        if run.cached and new > 1:
            mask = torch.ones(new, total, dtype=torch.bool, device=self._device).tril(run.cached)
        keys, values = self._heads(held)
        attended = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=not run.cached, enable_gqa=a.heads > a.kv_heads
        )
        return attended.transpose(1, 2).reshape(count * new, -1)

    def _heads(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each `[slots, kv_heads, length, head_dim]`, of cache rows `[slots, length, ...]`."""
        heads = held.transpose(1, 2)
        return heads[:, : self._a.kv_heads], heads[:, self._a.kv_heads :]


class _Run(msgspec.Struct, frozen=True):
    """Pieces of equal lengths, next to each other in the packed tokens."""

    start: int
    slots: list[int]
    cached: int
    new: int


def _runs(pieces: Sequence[Piece]) -> list[_Run]:
    runs: list[_Run] = []
    start = 0
    for (cached, new), run in groupby(pieces, key=lambda piece: (piece.cached, piece.new)):
        slots = [piece.slot for piece in run]
        runs.append(_Run(start=start, slots=slots, cached=cached, new=new))
        start += len(slots) * new
    return runs


def silu_times(gate_up: Tensor) -> Tensor:
    """See `Kernels`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def rotation_table(architecture: Architecture, max_length: int) -> Tensor:
    """Cosines, and sines signed for exchanged halves: `[2, max_length, head_dim]`, float32."""
    frequencies = architecture.rope.inverse_frequencies(architecture.head_dim)
    angles = torch.outer(torch.arange(max_length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
