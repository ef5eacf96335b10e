"""The weights that are served: laid out for speed, addressed by their Hugging Face names.

Q, K and V share one tensor, gate and up another, and matrices are kept as `[in, out]`: for
batches of 4 to 32 tokens on a CPU that is up to twice as fast as `[out, in]`. The names are views
of these tensors in the shapes of Hugging Face. So a copy into a named view updates what the
forward pass reads, and nothing has to be rebuilt after it.

Weights are served in one dtype and may be held in a wider one, in which is computed. Invariant: every
number that is held is one of the served dtype, so the checksum is that of the weights as served.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamrl.checksum import WeightsChecksum, dtype_name, weights_checksum
from streamrl.errors import ModelError
from streamrl.gserver.embedded.architecture import Architecture

TIED_HEAD = "lm_head.weight"


BLOCK = (128, 256)
"""Rows and columns that are transposed together: source and target fit into the processor's cache."""


class LayerWeights(msgspec.Struct):
    """One decoder layer; matrices are `[in, out]`."""

    input_norm: Tensor
    qkv: Tensor
    """`[hidden, (heads + 2 * kv_heads) * head_dim]`"""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """`[head_dim]`"""
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    """`[hidden, 2 * intermediate]`"""
    down: Tensor


class Parameters:
    """Owns every weight; `named` is the view of the outside."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        dtype: torch.dtype,
        device: torch.device,
        held_in: torch.dtype | None = None,
    ) -> None:
        """`held_in`: as what the weights of `dtype` lie in memory, `dtype` unless given."""
        self.architecture = architecture
        self.dtype = dtype
        self.held_in = held_in or dtype
        self.device = device
        self.named: dict[str, Tensor] = {}
        """Hugging Face name → view of the live weights, in `held_in`; without a tied head."""
        a = architecture
        self.embedding: Tensor
        """`[vocab, hidden]`"""
        self.head: Tensor
        """`[hidden, vocab]`"""
        if a.tied:
            self.head = self._matrix({"model.embed_tokens.weight": a.vocab_size}, a.hidden_size)
            self.embedding = self.head.t()
        else:
            self.embedding = self._vector("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
            self.head = self._matrix({TIED_HEAD: a.vocab_size}, a.hidden_size)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(a.layers)]
        self.norm = self._vector("model.norm.weight", a.hidden_size)

    def is_ignored(self, name: str) -> bool:
        """Whether `name` is a weight that repeats another one: the head of a tied model."""
        return self.architecture.tied and name == TIED_HEAD

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` in place; all names must be known and all shapes right (see `problems`)."""
        for name, tensor in weights.items():
            _copy(tensor.to(self.dtype), self.named[name])  # rounded first where they are held wider
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # another thread may be the next to compute with them

    def load(self, folder: Path) -> None:
        """Copy the checkpoint in `folder` in place, converting its dtype."""
        self.update(self.read(folder))

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The checkpoint in `folder`, checked to have exactly these weights."""
        found: dict[str, Tensor] = {}
        try:
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - no mapping
                        if not self.is_ignored(name):
                            found[name] = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weights in {folder} cannot be read: {error}") from error
        problems = [
            f"{name} has shape {list(tensor.shape)} instead of {list(self.named[name].shape)}"
            for name, tensor in found.items()
            if name in self.named and tensor.shape != self.named[name].shape
        ]
        problems += [f"{name} is unknown" for name in found if name not in self.named]
        problems += [f"{name} is missing" for name in self.named if name not in found]
        if problems:
            raise ModelError(f"the weights in {folder} do not fit its model: {'; '.join(problems[:8])}")
        return found

    def checksum(self) -> WeightsChecksum:
        """Fingerprint of the live weights as served."""
        if self.held_in == self.dtype:
            return weights_checksum(self.named)
        return weights_checksum({name: tensor.to(self.dtype) for name, tensor in self.named.items()})

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    def _layer(self, prefix: str) -> LayerWeights:
        a = self.architecture
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q, kv, hidden = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden_size
        qkv_rows = {f"{attention}{x}_proj": rows for x, rows in (("q", q), ("k", kv), ("v", kv))}
        gate_up_rows = {f"{mlp}gate_proj": a.intermediate_size, f"{mlp}up_proj": a.intermediate_size}
        return LayerWeights(
            input_norm=self._vector(prefix + "input_layernorm.weight", hidden),
            qkv=self._matrix({f"{name}.weight": rows for name, rows in qkv_rows.items()}, hidden),
            qkv_bias=self._fused({f"{name}.bias": rows for name, rows in qkv_rows.items()}) if a.qkv_bias else None,
            q_norm=self._vector(attention + "q_norm.weight", a.head_dim) if a.qk_norm else None,
            k_norm=self._vector(attention + "k_norm.weight", a.head_dim) if a.qk_norm else None,
            o=self._matrix({attention + "o_proj.weight": hidden}, q),
            o_bias=self._vector(attention + "o_proj.bias", hidden) if a.o_bias else None,
            post_norm=self._vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._matrix({f"{name}.weight": rows for name, rows in gate_up_rows.items()}, hidden),
            down=self._matrix({mlp + "down_proj.weight": hidden}, a.intermediate_size),
        )

    def _matrix(self, outputs: Mapping[str, int], inputs: int) -> Tensor:
        """`[inputs, sum of outputs]`, whose columns belong to several names."""
        matrix = self._zeros(inputs, sum(outputs.values()))
        start = 0
        for name, count in outputs.items():
            self.named[name] = matrix[:, start : start + count].t()
            start += count
        return matrix

    def _vector(self, name: str, *shape: int) -> Tensor:
        self.named[name] = self._zeros(*shape)
        return self.named[name]

    def _fused(self, lengths: Mapping[str, int]) -> Tensor:
        """One vector whose parts belong to several names."""
        fused = self._zeros(sum(lengths.values()))
        start = 0
        for name, count in lengths.items():
            self.named[name] = fused[start : start + count]
            start += count
        return fused

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.held_in, device=self.device)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy in place; block by block where the target lies transposed on a CPU, which is two to three times as fast."""
    if target.dim() != 2 or target.is_contiguous() or target.device.type != "cpu":
        target.copy_(source)
        return
    for rows in range(0, target.shape[0], BLOCK[0]):
        for columns in range(0, target.shape[1], BLOCK[1]):
            block = slice(rows, rows + BLOCK[0]), slice(columns, columns + BLOCK[1])
            target[block].copy_(source[block])
