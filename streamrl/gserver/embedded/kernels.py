"""What the forward pass does besides matrix products and the attention of prompts, and how torch does it.

`compiled.py` does the same on a CPU in fewer passes over memory, where there is a C compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from streamrl.gserver.embedded.architecture import Architecture

Turn = Callable[[Tensor, Tensor], None]
Attend = Callable[[Tensor, Tensor], Tensor]


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

    def attend(self, lengths: Sequence[int]) -> Attend:
        """For the first slots, of so many tokens: a function from queries `[slots, heads, head_dim]` of their last
        tokens, and a layer's cache, to `[slots, heads * head_dim]`."""


class TorchKernels:
    """`Kernels` of torch's operations, on any device."""

    def __init__(
        self, architecture: Architecture, *, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._a = architecture
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
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

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

    def attend(self, lengths: Sequence[int]) -> Attend:
        a, n, longest = self._a, len(lengths), max(lengths)
        mask = None
        if min(lengths) < longest:
            places = torch.arange(longest, device=self._device)
            hidden = places >= torch.tensor(lengths, device=self._device)[:, None]
            mask = torch.zeros(n, 1, 1, longest, dtype=self._dtype, device=self._device)
            mask.masked_fill_(hidden[:, None, None], float("-inf"))

        def attend(queries: Tensor, layer: Tensor) -> Tensor:
            heads = layer[:n, :longest].transpose(1, 2)
            grouped = queries.view(n, a.kv_heads, -1, a.head_dim)
            keys, values = heads[:, : a.kv_heads], heads[:, a.kv_heads :]
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(n, -1)

        return attend


def rotation_table(architecture: Architecture, max_length: int) -> Tensor:
    """Cosines, and sines signed for exchanged halves: `[2, max_length, head_dim]`, float32."""
    frequencies = architecture.rope.inverse_frequencies(architecture.head_dim)
    angles = torch.outer(torch.arange(max_length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
