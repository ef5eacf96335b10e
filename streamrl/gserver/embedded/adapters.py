"""Low-rank adapters of the served model: each version is a separate adapter, and a request keeps its first one.

An update fills a new `Adapter` while others are in use; after the swap it is the adapter of new requests. An adapter
lives as long as it is staged, served, or in use by a request.

An adapter's tensors have the names that Hugging Face's peft gives them (`streamrl/lora.py`). The parts of a fused
matrix (Q, K and V; gate and up) read the same input, so their A are neighbouring rows of one matrix.

Invariant: a served adapter is never written to.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from streamrl.checksum import LineSums, WeightsChecksum, line_sums, weights_checksum
from streamrl.config import LoraConfig
from streamrl.errors import ModelError
from streamrl.gserver.embedded.weights import Parameters, store_rounded
from streamrl.lora import TENSORS, adapter_specs, check_adapter, is_adapted, pair_of


class LinearAdapter(NamedTuple):
    """The adapter of one linear layer, a part of a fused matrix."""

    b: Tensor
    """`[outputs, rank]`"""
    columns: slice
    """The layer's outputs in the fused matrix."""


class MatrixAdapter:
    """The adapters of the linear layers that make up one matrix."""

    def __init__(self, a: Tensor, parts: Sequence[LinearAdapter], *, scale: float) -> None:
        """`a`: `[parts · rank, inputs]`."""
        self._a = a
        self._parts = parts
        self._scale = scale

    def add(self, product: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """Add the adapters' share to the matrix's `product` (`[tokens, outputs]`) of `x` (`[tokens, inputs]`); only to
        the rows in `rows` if given."""
        low = F.linear(x if rows is None else x[rows], self._a).chunk(len(self._parts), -1)
        for own, (b, columns) in zip(low, self._parts, strict=True):
            if rows is None:
                product[:, columns].addmm_(own, b.T, alpha=self._scale)
            else:
                product[:, columns].index_add_(0, rows, F.linear(own, b), alpha=self._scale)


class LayerAdapter(NamedTuple):
    """The adapters of one decoder layer; None for a matrix without adapted linear layers."""

    qkv: MatrixAdapter | None
    o: MatrixAdapter | None
    gate_up: MatrixAdapter | None
    down: MatrixAdapter | None


MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Matrix of `LayerWeights` → its linear layers, in the order of their rows."""


class Adapter:
    """One version, initially of zeros, so that it changes nothing."""

    def __init__(self, parameters: Parameters, lora: LoraConfig) -> None:
        """`parameters`: those of the adapted model."""
        self.named: dict[str, Tensor] = {}
        """Name → contiguous tensor in the compute dtype; written to only before it is served."""
        self._parameters = parameters
        self._lora = lora
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(parameters.architecture.layers)]

    def _layer(self, prefix: str) -> LayerAdapter:
        return LayerAdapter(**{matrix: self._matrix(prefix, layers) for matrix, layers in MATRICES.items()})

    def _matrix(self, prefix: str, layers: Sequence[str]) -> MatrixAdapter | None:
        names = [f"{prefix}{layer}.weight" for layer in layers]
        if not self._parameters.named.keys() >= set(names):  # experts, for example
            return None
        shapes = [self._parameters.named[name].shape for name in names]
        adapted = [is_adapted(name, self._lora) for name in names]
        if not any(adapted):
            return None
        rank, inputs = self._lora.rank, shapes[0][1]
        a = self._zeros(rank * sum(adapted), inputs)
        rows = iter(torch.split(a, rank))
        parts: list[LinearAdapter] = []
        end = 0
        for name, (outputs, _), chosen in zip(names, shapes, adapted, strict=True):
            begin, end = end, end + outputs
            if chosen:
                part = LinearAdapter(self._zeros(outputs, rank), slice(begin, end))
                self.named |= zip(pair_of(name), (next(rows), part.b), strict=True)
                parts.append(part)
        return MatrixAdapter(a, parts, scale=self._lora.scale)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._parameters.compute_dtype, device=self._parameters.device)


Adapted = Sequence[tuple[Adapter, Tensor | None]]
"""Adapters and the rows of a batch that they apply to (`[rows]`); None: all rows."""


def rows_of(adapters: Sequence[Adapter | None], *, device: torch.device) -> Adapted:
    """Return the rows of a batch for each adapter; `adapters`: one for each row."""
    rows: dict[int, list[int]] = {}
    found: dict[int, Adapter] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            found[id(adapter)] = adapter
            rows.setdefault(id(adapter), []).append(row)
    if len(found) == 1 and len(*rows.values()) == len(adapters):
        return [(adapter, None) for adapter in found.values()]
    return [(found[key], torch.tensor(own, device=device)) for key, own in rows.items()]


class Adapters:
    """The served adapter, and the staged one. Implements `WeightsAside` (`server/receiver.py`)."""

    def __init__(self, parameters: Parameters, lora: LoraConfig) -> None:
        """`parameters`: those of the adapted model. Raises `ModelError` if it lacks one of the linear layers."""
        self._parameters = parameters
        self._lora = lora
        specs = adapter_specs([(name, tuple(weight.shape)) for name, weight in parameters.named.items()], lora)
        self.shapes: dict[str, tuple[int, ...]] = dict(specs)
        """Name → shape of the tensors in an update."""
        self.ignored: frozenset[str] = frozenset()
        """Names that may come with an update and are dropped."""
        self.served = self._new()
        if others := sorted(self.shapes.keys() - self.served.named.keys()):
            raise ModelError(
                f"the embedded engine has no adapters of such layers as {others[0]} belongs to; "
                'take weights.lora = "merged"'
            )
        self._staged: Adapter | None = None
        self._making = threading.Lock()

    def load_served(self, folder: Path) -> None:
        """Serve the adapter in `folder`, in peft's format; raises `ModelError`."""
        check_adapter(folder, self._lora)
        self._load(folder / f"{TENSORS}.safetensors")
        self.swap()

    def load_staged(self, folder: Path) -> None:
        """Write the tensors in `folder` to the staged adapter; raises `ModelError`."""
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise ModelError(f"an adapter is one safetensors file, and {folder} has {len(files)}")
        self._load(files[0])

    def store(self, name: str, tensor: Tensor) -> LineSums:
        return store_rounded(self._writable().named[name], tensor, dtype=self._parameters.dtype)

    def place(self, name: str) -> Tensor | None:
        same = self._parameters.compute_dtype == self._parameters.dtype
        return self._writable().named[name] if same else None

    def sums(self, name: str) -> LineSums:
        return line_sums(self._writable().named[name])

    def adopt(self, weights: Mapping[str, Tensor]) -> bool:
        return False  # the tensors are few, and A of fused matrices have to be adjacent

    def forget(self) -> None:
        with self._making:
            self._staged = None

    def make_ready(self) -> None:
        self._parameters.synchronize()

    def swap(self) -> Adapter:
        """Serve the staged adapter, and return it."""
        self.make_ready()
        self.served, self._staged = self._writable(), None
        return self.served

    def checksum(self) -> WeightsChecksum:
        """Return the checksum of the served adapter, as it was published."""
        return weights_checksum({name: tensor.to(self._parameters.dtype) for name, tensor in self.served.named.items()})

    def _load(self, file: Path) -> None:
        self.forget()
        try:
            found = load_file(file)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the adapter {file} cannot be read: {error}") from error
        if {name: tuple(tensor.shape) for name, tensor in found.items()} != self.shapes:
            raise ModelError(f"the adapter {file} has other tensors than [model.lora] asks for")
        for name, tensor in found.items():
            self.store(name, tensor)

    def _writable(self) -> Adapter:
        with self._making:
            if self._staged is None:
                self._staged = self._new()
            return self._staged

    def _new(self) -> Adapter:
        return Adapter(self._parameters, self._lora)
