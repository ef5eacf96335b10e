"""The model's weights, double-buffered: one set is served, an update fills the staged one; a swap exchanges them.

A set (`Parameters`) has Hugging Face's layout and is addressed by its names. Q, K and V are neighbouring rows of one
matrix, gate and up of another, so every name is a contiguous view and an update is a plain copy into it. A set may also
be adopted, that is, served from memory that another process has filled: a publisher on this host may put the weights
into shared memory. Where packed products are faster (`products.py`), each matrix may have a packed copy in addition.

Weights are served in one dtype and may be kept in a wider one, which is used for computation.

Invariants: the served set is never written to, and an adopted set never at all.
No result is computed from a packed copy older than the weights; a matrix is unpacked before it is written to.
Every stored number is representable in the served dtype, so the checksum is that of the weights as served.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from streamrl.architecture import Architecture
from streamrl.checksum import LineSums, WeightsChecksum, copy_and_sum, line_sums, weights_checksum
from streamrl.errors import ModelError
from streamrl.gserver.embedded.products import Matrix, Packer, packs
from streamrl.safetensors_files import MODEL, TensorFiles

TIED_HEAD = "lm_head.weight"


class DoubleBufferedWeights:
    """Implements `WeightsAside` (`server/receiver.py`): threads other than the engine's fill the staged set."""

    def __init__(
        self,
        architecture: Architecture | None,
        *,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        threads: int,
        deterministic: bool = False,
    ) -> None:
        """Arguments as in `Parameters`; a subclass that makes other sets passes no `architecture`.

        `deterministic`: a set is served once all its matrices are packed, so that equal requests get equal results to
        the last bit; otherwise it is served at once, and packed during service.
        """
        self._architecture = architecture
        self.dtype = dtype
        self._compute_dtype = compute_dtype
        self._device = device
        self._threads = threads
        self._deterministic = deterministic
        self.served = self._new()
        self._staged: Parameters | None = None
        """The staged set; None: a new one will be made."""
        self._retired: Parameters | None = None
        """The previously served set, which must not be written to."""
        self._making = threading.Lock()

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        assert self._architecture is not None, "a subclass has its own sizes"
        return self._architecture.vocab_size

    @property
    def max_position(self) -> int:
        """Number of positions that the model supports."""
        assert self._architecture is not None, "a subclass has its own sizes"
        return self._architecture.max_position

    def load_served(self, folder: Path) -> None:
        """Write the checkpoint in `folder` to the served set, before the first computation; raises `ModelError`."""
        self.served.load(folder)
        self.served.synchronize()
        self.served.pack()

    def load_staged(self, folder: Path) -> None:
        """Write the checkpoint in `folder` to the staged set; raises `ModelError`."""
        self._writable().load(folder)

    def store(self, name: str, tensor: Tensor) -> LineSums:
        return self._writable().write(name, tensor)

    def place(self, name: str) -> Tensor | None:
        return self._writable().place(name) if self._compute_dtype == self.dtype else None

    def sums(self, name: str) -> LineSums:
        return line_sums(self._writable().named[name])

    def adopt(self, weights: Mapping[str, Tensor]) -> bool:
        if self._compute_dtype != self.dtype or self._device.type != "cpu":
            return False
        with self._making:
            self._staged = self._new(adopted=weights)
        return True

    def forget(self) -> None:
        with self._making:
            self._staged = None

    def make_ready(self) -> None:
        staged = self._staged_or_new()
        staged.synchronize()
        if self._deterministic:
            staged.pack()

    def swap(self) -> Parameters:
        """Serve the staged set and return it. Call `free_retired` afterwards, when there is time."""
        self.make_ready()
        old, self.served = self.served, self._staged_or_new()
        old.stop_packing()
        self._staged, self._retired = (None, old) if old.read_only else (old, None)
        self.served.start_packing()
        return self.served

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of the weights in an update."""
        return {name: tuple(tensor.shape) for name, tensor in self.served.named.items()}

    @property
    def ignored(self) -> frozenset[str]:
        """Names that may come with an update and are dropped."""
        return frozenset((TIED_HEAD,)) if self._architecture is not None and self._architecture.tied else frozenset()

    def checksum(self) -> WeightsChecksum:
        """Return the checksum of the weights as served."""
        return self.served.checksum()

    def free_retired(self) -> None:
        """Free the previously served set; takes longer the larger it is."""
        self._retired = None

    def _writable(self) -> Parameters:
        """Return the staged set, or a new one in its place if it was adopted."""
        with self._making:
            if self._staged is None or self._staged.read_only:
                self._staged = self._new()
            return self._staged

    def _staged_or_new(self) -> Parameters:
        """Return the staged set, adopted or not."""
        with self._making:
            if self._staged is None:
                self._staged = self._new()
            return self._staged

    def _new(self, adopted: Mapping[str, Tensor] | None = None) -> Parameters:
        assert self._architecture is not None, "a subclass makes the sets"
        return Parameters(
            self._architecture,
            dtype=self.dtype,
            device=self._device,
            compute_dtype=self._compute_dtype,
            threads=self._threads,
            deterministic=self._deterministic,
            adopted=adopted,
        )


class MlpWeights(msgspec.Struct):
    """A feed-forward network."""

    gate_up: Matrix
    """`[2 * intermediate, hidden]`"""
    down: Matrix


class SparseMlpWeights(msgspec.Struct):
    """The experts of a layer."""

    router: Tensor
    """`[experts, hidden]`"""
    experts: list[MlpWeights]


class LayerWeights(msgspec.Struct):
    """One decoder layer."""

    input_norm: Tensor
    qkv: Matrix
    """`[(heads + 2 * kv_heads) * head_dim, hidden]`"""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """`[head_dim]`"""
    k_norm: Tensor | None
    o: Matrix
    o_bias: Tensor | None
    post_norm: Tensor
    mlp: MlpWeights | SparseMlpWeights


class Parameters:
    """One set of weights: by layer for the forward pass, and by name (`named`) for other uses."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        dtype: torch.dtype,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        threads: int = 1,
        deterministic: bool = False,
        adopted: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`compute_dtype`: dtype of the weights in memory; `dtype` unless given. `threads`: number of threads that
        compute with them. `deterministic`: every process packs them in the same way (`products.py`). `adopted`: all
        weights by name, which are only read; without it new memory is allocated, to be written to."""
        self.architecture = architecture
        self.dtype = dtype
        self.compute_dtype = compute_dtype or dtype
        self.device = device
        self.read_only = adopted is not None
        """Whether the weights must not be written to, because other processes read them."""
        self.named: dict[str, Tensor] = {}
        """Hugging Face name → contiguous view of the weights, in `compute_dtype`; without a tied head. Read-only."""
        self._adopted = adopted
        self._synchronized = True
        """Whether nothing was written since `synchronize`."""
        self._packer = Packer(threads=threads, deterministic=deterministic)
        self._lock = threading.Lock()
        self._matrices: list[Matrix] = []
        self._matrix_of: dict[str, Matrix] = {}
        a = architecture
        self.embedding = self._vector("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
        """`[vocab, hidden]`"""
        if a.tied:
            self.head = self._matrix_over(self.embedding, ["model.embed_tokens.weight"])
        else:
            self.head = self._matrix({TIED_HEAD: a.vocab_size}, a.hidden_size)
        """`[vocab, hidden]`"""
        sparse = a.moe.layers if a.moe is not None else ()
        self.layers = [self._layer(f"model.layers.{i}.", sparse=i in sparse) for i in range(a.layers)]
        self.norm = self._vector("model.norm.weight", a.hidden_size)
        numbers = sum(matrix.weight.numel() for matrix in self._matrices)
        self._packs = packs(numbers=numbers, dtype=self.compute_dtype, device=device)

    def is_ignored(self, name: str) -> bool:
        """Return whether `name` is a weight that repeats another one: the head of a tied model."""
        return self.architecture.tied and name == TIED_HEAD

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Write `weights` (Hugging Face name → tensor)."""
        for name, tensor in weights.items():
            self.write(name, tensor)

    def place(self, name: str) -> Tensor:
        """Return the memory of one weight, in `compute_dtype`, to be written to.

        Several threads may write, each to another weight.
        """
        assert not self.read_only, "others read these weights"
        self._synchronized = False
        matrix = self._matrix_of.get(name)
        if matrix is not None:
            with self._lock:
                self._packer.unpack(matrix)
        return self.named[name]

    def write(self, name: str, tensor: Tensor) -> LineSums:
        """Copy one weight in place; its name must be known and its shape right.

        Several threads may write, each to another weight. Returns the sums of the written weight, as it is served.
        """
        return store_rounded(self.place(name), tensor, dtype=self.dtype)

    def synchronize(self) -> None:
        """Wait for the writes in the current stream; another thread may then compute with the weights."""
        if self.device.type == "cuda" and not self._synchronized:
            torch.cuda.current_stream(self.device).synchronize()
        self._synchronized = True

    def wait_for_device(self) -> None:
        """Wait for all work on a GPU; raises its error if it has failed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start_packing(self) -> None:
        """Begin to pack the unpacked matrices, where that is faster; other threads may use the weights in the
        meantime."""
        if self._packs:
            self._packer.start(self._matrices)

    def pack(self) -> None:
        """Pack the unpacked matrices, where that is faster."""
        self.start_packing()
        self._packer.finish()

    def stop_packing(self) -> None:
        """Stop packing, since these weights are no longer used for computation."""
        self._packer.stop()

    def load(self, folder: Path) -> None:
        """Copy the checkpoint in `folder` in place, one weight after another, converting its dtype.

        Raises `ModelError`, before anything is written, unless it has exactly these weights.
        """
        files = TensorFiles(folder, MODEL)
        files.check([(name, tuple(tensor.shape)) for name, tensor in self.named.items()])
        if unknown := [name for name in files.names() if name not in self.named and not self.is_ignored(name)]:
            raise ModelError(f"the weights in {folder} do not fit its model, which has no {', '.join(unknown[:8])}")
        for name in self.named:
            self.write(name, files.read(name))

    def checksum(self) -> WeightsChecksum:
        """Return the checksum of the weights as served."""
        if self.compute_dtype == self.dtype:
            return weights_checksum(self.named)
        return weights_checksum({name: tensor.to(self.dtype) for name, tensor in self.named.items()})

    def _layer(self, prefix: str, *, sparse: bool) -> LayerWeights:
        a = self.architecture
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q, kv, hidden = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.hidden_size
        qkv_rows = {f"{attention}{x}_proj": rows for x, rows in (("q", q), ("k", kv), ("v", kv))}
        return LayerWeights(
            input_norm=self._vector(prefix + "input_layernorm.weight", hidden),
            qkv=self._matrix({f"{name}.weight": rows for name, rows in qkv_rows.items()}, hidden),
            qkv_bias=self._fused({f"{name}.bias": rows for name, rows in qkv_rows.items()}) if a.qkv_bias else None,
            q_norm=self._vector(attention + "q_norm.weight", a.head_dim) if a.qk_norm else None,
            k_norm=self._vector(attention + "k_norm.weight", a.head_dim) if a.qk_norm else None,
            o=self._matrix({attention + "o_proj.weight": hidden}, q),
            o_bias=self._vector(attention + "o_proj.bias", hidden) if a.o_bias else None,
            post_norm=self._vector(prefix + "post_attention_layernorm.weight", hidden),
            mlp=self._sparse_mlp(mlp) if sparse else self._mlp(mlp, a.intermediate_size),
        )

    def _mlp(self, prefix: str, intermediate: int) -> MlpWeights:
        hidden = self.architecture.hidden_size
        gate_up = {f"{prefix}{x}_proj.weight": intermediate for x in ("gate", "up")}
        return MlpWeights(
            gate_up=self._matrix(gate_up, hidden, gated=True),
            down=self._matrix({f"{prefix}down_proj.weight": hidden}, intermediate),
        )

    def _sparse_mlp(self, prefix: str) -> SparseMlpWeights:
        moe = self.architecture.moe
        assert moe is not None
        return SparseMlpWeights(
            router=self._vector(prefix + "gate.weight", moe.experts, self.architecture.hidden_size),
            experts=[self._mlp(f"{prefix}experts.{i}.", moe.intermediate_size) for i in range(moe.experts)],
        )

    def _matrix(self, rows: Mapping[str, int], inputs: int, *, gated: bool = False) -> Matrix:
        """Return a matrix `[sum of rows, inputs]` whose rows belong to several names; `rows`: name → number of rows."""
        return self._matrix_over(self._fused(rows, inputs), list(rows), gated=gated)

    def _matrix_over(self, weight: Tensor, names: Sequence[str], *, gated: bool = False) -> Matrix:
        matrix = Matrix(weight, gated=gated)
        self._matrices.append(matrix)
        self._matrix_of.update(dict.fromkeys(names, matrix))
        return matrix

    def _vector(self, name: str, *shape: int) -> Tensor:
        self.named[name] = self._zeros(*shape) if self._adopted is None else self._adopted[name]
        return self.named[name]

    def _fused(self, rows: Mapping[str, int], *inputs: int) -> Tensor:
        """Return one tensor whose rows belong to several names."""
        if self._adopted is not None:
            fused = joined([self._adopted[name] for name in rows])
        else:
            fused = self._zeros(sum(rows.values()), *inputs)
        self.named.update(zip(rows, torch.split(fused, list(rows.values())), strict=True))
        return fused

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.compute_dtype, device=self.device)


def store_rounded(place: Tensor, tensor: Tensor, *, dtype: torch.dtype) -> LineSums:
    """Copy `tensor`, rounded to `dtype`, to `place`, which may be wider; return the sums of the rounded tensor."""
    rounded = tensor.to(dtype)
    if place.dtype == dtype and place.is_contiguous():
        return copy_and_sum(place, rounded)
    place.copy_(rounded)
    return line_sums(place.to(dtype))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all `parts`, contiguous: a view if they are adjacent in the same memory, else a copy."""
    first = parts[0]
    place = first.data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(parts))
        place += part.nbytes
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())
