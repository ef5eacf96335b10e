"""The forward pass: `extend` adds prompts to the cache, `decode` adds one token to every running slot.

Tokens of different sequences are packed without padding; only attention knows sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from streamrl.gserver.embedded.architecture import Architecture
from streamrl.gserver.embedded.cache import KVCache
from streamrl.gserver.embedded.compiled import kernels_for
from streamrl.gserver.embedded.kernels import Attend, Piece, Turn
from streamrl.gserver.embedded.parameters import LayerWeights, Parameters


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


class Model:
    """Computes with `parameters` (of one shape, dtype and device; may be exchanged) on `cache`."""

    def __init__(self, parameters: Parameters, cache: KVCache, *, max_length: int, copies_cache: bool = False) -> None:
        """`copies_cache`: see `TorchKernels`."""
        self.parameters = parameters
        self.cache = cache
        self._a: Architecture = parameters.architecture
        self._device = parameters.device
        self._kernels = kernels_for(
            self._a,
            max_length=max_length,
            dtype=parameters.held_in,
            device=self._device,
            copies_cache=copies_cache,
        )

    def extend(self, extensions: Sequence[Extension]) -> tuple[Tensor, list[int]]:
        """Hidden states of the wanted tokens, packed, and where each extension's begin.

        Extensions are best passed sorted by (cached, new) lengths: torch attends to neighbours of equal lengths
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
        chosen = None if len(wanted) == len(tokens) else torch.tensor(wanted, dtype=torch.long, device=self._device)
        return self._forward(place, pieces, wanted=chosen), starts

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits `[n, vocab]` after `tokens[i]`, which stands at `positions[i]` of slot i."""
        place = torch.tensor([tokens, positions, range(len(tokens))], device=self._device)
        pieces = [Piece(slot, position, 1) for slot, position in enumerate(positions)]
        return self.logits(self._forward(place, pieces))

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, vocab]` in the dtype that is computed in."""
        return self.parameters.head(self._kernels.rms_norm(hidden, self.parameters.norm))

    def _forward(self, place: Tensor, pieces: Sequence[Piece], *, wanted: Tensor | None = None) -> Tensor:
        """Hidden states of the `wanted` tokens: the last layer ends with these alone. `place`: `[3, tokens]`, the
        tokens, their positions and their slots."""
        tokens, positions, slots = place.unbind()
        turn: Turn = self._kernels.turn(positions, self.cache.rows(slots, positions))
        attend: Attend = self._kernels.attend(slots, positions, pieces)
        x = self.parameters.embedding.index_select(0, tokens)
        last = self._a.layers - 1
        for i, layer in enumerate(self.parameters.layers):
            qkv = self._queries_keys_values(layer, x)
            turn(qkv, self.cache.layers[i])
            attended = attend(qkv, self.cache.layers[i])
            if i == last and wanted is not None:
                x, attended = x[wanted], attended[wanted]
            x = layer.o(attended, layer.o_bias, added=x)
            gated = layer.gate_up.gated(self._kernels.rms_norm(x, layer.post_norm), self._kernels.silu_times)
            x = layer.down(gated, added=x)
        return x

    def _queries_keys_values(self, w: LayerWeights, x: Tensor) -> Tensor:
        a = self._a
        qkv = w.qkv(self._kernels.rms_norm(x, w.input_norm), w.qkv_bias).view(len(x), -1, a.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            queries, keys = qkv[:, : a.heads], qkv[:, a.heads : a.heads + a.kv_heads]
            queries.copy_(self._kernels.rms_norm(queries, w.q_norm))
            keys.copy_(self._kernels.rms_norm(keys, w.k_norm))
        return qkv
