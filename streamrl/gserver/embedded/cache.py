"""Keys and values of all slots, in one tensor for each layer that grows with need.

A slot holds one sequence, all of a token next to each other. Slots that are in use are always the first ones, so that
a decode step reads plain slices of these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streamrl.gserver.embedded.architecture import Architecture

FIRST_SLOTS = 8
FIRST_LENGTH = 128


class KVCache:
    """`[slots, length, 2 * kv_heads, head_dim]` for each layer; of the heads the first half are keys."""

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
        """Of one token in all layers."""
        return sum(2 * self._kv_heads * self._head_dim * layer.element_size() for layer in self.layers)

    def reserve(self, *, slots: int, length: int) -> None:
        """Make room for so many slots of so many tokens; doubles, so that copies stay rare."""
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
        """Where token i, at `positions[i]` of `slots[i]`, lies: `[tokens]`."""
        return slots * self.length + positions

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of a slot to others, given in ascending order."""
        for layer in self.layers:
            kept = layer[source, :length]
            for first, last in _spans(targets):
                layer[first : last + 1, :length] = kept

    def take(self, slot: int, length: int) -> list[Tensor]:
        """A copy of the first `length` tokens of a slot: `[length, 2 * kv_heads, head_dim]` for each layer."""
        return [layer[slot, :length].clone() for layer in self.layers]

    def put(self, slot: int, taken: Sequence[Tensor], length: int) -> None:
        """Copy the first `length` tokens of what was taken into a slot."""
        for layer, kept in zip(self.layers, taken, strict=True):
            layer[slot, :length] = kept[:length]

    def _empty(self) -> Tensor:
        # Zeros, not garbage: masked positions are multiplied by 0, which does not remove a NaN.
        shape = (self.slots, self.length, 2 * self._kv_heads, self._head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


def _spans(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending `slots` as (first, last) of each stretch without a gap."""
    spans: list[tuple[int, int]] = []
    for slot in slots:
        if spans and spans[-1][1] == slot - 1:
            spans[-1] = (spans[-1][0], slot)
        else:
            spans.append((slot, slot))
    return spans
