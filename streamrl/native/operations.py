"""The operations that streamrl has in C for CPUs, each beside its twin in torch.

Role: nothing else in streamrl calls C. Callers say what is to be computed; whether C or torch does it is decided here.
Invariant: a library is used only after what it computes on random numbers has been compared with the twins. Without a
compiler, for numbers or shapes that there is no code for, or if the comparison fails, torch does it, and the log says
so.

- **Sums** of the rows and columns of integers (`sums.c`), from which `streamrl/checksum.py` makes checksums.
- **Layers** (`layers.c`): what a decoder layer does besides matrix products, `Operations`.
- **Products** with packed weights (`products.c`); `gserver/embedded/products.py` chooses between these and those of the
  libraries that come with torch.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from streamrl.device import attend_without_plans
from streamrl.native.build import Unavailable, has_instructions, shared_library

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent

# --- Sums -------------------------------------------------------------------------------------------------------------

AddSums = Callable[[Tensor, Tensor, Tensor], None]
"""Writes the sums of the rows of a matrix (`[rows, columns]`) to the second argument (`[rows]`), and adds those of its
columns to the third (`[columns]`). All are integers of the same width; sums are modulo two to the power of it."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes → integer of that width."""


def add_sums(matrix: Tensor, row_sums: Tensor, column_sums: Tensor) -> None:
    """`AddSums` in torch, which reads the matrix twice."""
    torch.sum(matrix, 1, dtype=matrix.dtype, out=row_sums)
    column_sums += torch.sum(matrix, 0, dtype=matrix.dtype)


@cache
def native_add_sums() -> AddSums | None:
    """Return `AddSums` in C for contiguous matrices on a CPU, which reads the matrix once; None where there is none."""
    try:
        library = ctypes.CDLL(str(shared_library([FOLDER / "sums.c"])))
        functions = {size: getattr(library, f"sums_of_{size}") for size in INTEGERS}
    except (Unavailable, OSError) as reason:
        log.info("torch takes the checksums of weights, which is slower: %s", reason)
        return None
    for function in functions.values():
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        function.restype = None

    def add(matrix: Tensor, row_sums: Tensor, column_sums: Tensor) -> None:
        functions[matrix.element_size()](matrix.data_ptr(), *matrix.shape, row_sums.data_ptr(), column_sums.data_ptr())

    for integer in INTEGERS.values():
        tried = torch.arange(-600, 610).view(10, 121).to(integer)
        if not torch.equal(_sums_by(add, tried), _sums_by(add_sums, tried)):
            log.warning("torch takes the checksums of weights: the compiled code is wrong for %s", integer)
            return None
    return add


def _sums_by(add: AddSums, matrix: Tensor) -> Tensor:
    """Return the sums of rows and columns, one after another."""
    row_sums, column_sums = matrix.new_empty(matrix.shape[0]), matrix.new_zeros(matrix.shape[1])
    add(matrix, row_sums, column_sums)
    return torch.cat([row_sums, column_sums])


# --- Layers -----------------------------------------------------------------------------------------------------------

HEAD_DIMS = (32, 64, 96, 128, 256)
"""Sizes of a head for which there is C."""
RotateAndStore = Callable[[Tensor, Tensor], None]
Attend = Callable[[Tensor, Tensor], Tensor]


class SlotSpan(msgspec.Struct, frozen=True):
    """New tokens of one slot, next to each other, after `cached` tokens that the cache holds already."""

    slot: int
    cached: int
    new: int


class Operations(Protocol):
    """What a decoder layer of one model does besides matrix products.

    A layer's cache is `[slots, length, 2 * kv_heads, head_dim]`: the first half of the heads are keys, the others
    values. Queries, keys and values of tokens (`qkv`) are `[tokens, heads + 2 * kv_heads, head_dim]`.
    """

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Divide rows of `x` (`[rows, width]`, or `[rows, heads, width]`) by the root of their mean squares and
        multiply them by `weight` (`[width]`). Returns a new tensor."""

    def rotate_and_store(self, positions: Tensor, rows: Tensor) -> RotateAndStore:
        """Return a function for tokens at `positions` (`[tokens]`): given a `qkv` and a layer's cache, it rotates
        queries and keys in place (rotary position embedding), and writes keys and values to `rows` (`[tokens]`) of the
        cache, whose slots follow one another."""

    def attend(self, slots: Tensor, positions: Tensor, pieces: Sequence[SlotSpan]) -> Attend:
        """Return a function for the tokens of `pieces`, which are at `positions` of `slots` (`[tokens]` each): given a
        `qkv` and a layer's cache that holds its keys and values already, it returns causal attention of each token to
        its slot, `[tokens, heads * head_dim]`."""


def operations_for(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    rotation: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    copies_cache: bool = False,
    native: bool = True,
) -> Operations:
    """Return the operations of a model: in C where there is some for its shape and `native`, else `TorchOperations`,
    whose constructor has the same other arguments."""
    library = None
    if native and device.type == "cpu" and head_dim in HEAD_DIMS:
        library = library_for(dtype)
    in_torch = TorchOperations(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=eps,
        rotation=rotation,
        dtype=dtype,
        device=device,
        copies_cache=copies_cache,
    )
    return in_torch if library is None else NativeOperations(library, in_torch)


class TorchOperations:
    """`Operations` in torch, on any device."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        rotation: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        copies_cache: bool = False,
    ) -> None:
        """`eps`: added to mean squares. `rotation`: `[2, positions, head_dim]`, float32: cosines, and sines with the
        sign that exchanged halves of a head need. `copies_cache`: single pieces attend to a copy of the cache that is
        laid out the same whatever the slot, because rounding may depend on where rows begin in memory."""
        attend_without_plans(device)
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.eps = eps
        self.rotation = rotation.to(dtype).to(device)
        self._copies_cache = copies_cache
        self._device = device
        self._composes_norm = device.type == "cpu" and dtype == torch.float32
        self._eps = torch.tensor(eps, device=device)
        self._dtype = dtype

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self._composes_norm:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # Torch's own is slow on a CPU in float32.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)

    def rotate_and_store(self, positions: Tensor, rows: Tensor) -> RotateAndStore:
        cos, sin = self.rotation[:, positions, None].unbind()
        stored = 2 * self.kv_heads

        def rotate_and_store(qkv: Tensor, layer: Tensor) -> None:
            rotated = qkv[:, : self.heads + self.kv_heads]
            # `sin` carries the sign of rotate_half, so that exchanged halves do for it.
            exchanged = torch.cat(rotated.chunk(2, -1)[::-1], -1)
            rotated.mul_(cos).addcmul_(exchanged, sin)
            layer.flatten(0, 1).index_copy_(0, rows, qkv[:, -stored:])

        return rotate_and_store

    def attend(self, slots: Tensor, positions: Tensor, pieces: Sequence[SlotSpan]) -> Attend:
        ones = [piece.new for piece in pieces] == [1] * len(pieces)
        if ones and not self._copies_cache and [piece.slot for piece in pieces] == list(range(len(pieces))):
            return self._attend_slots([piece.cached + 1 for piece in pieces])
        runs = _runs(pieces)

        def attend(qkv: Tensor, layer: Tensor) -> Tensor:
            parts = [self._attend_run(run, qkv, layer) for run in runs]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend

    def _attend_slots(self, lengths: Sequence[int]) -> Attend:
        """Attention of the last token of each of the first slots, which hold `lengths` tokens."""
        longest = max(lengths)
        if min(lengths) < longest:
            return self.attend_slots(torch.tensor(lengths, device=self._device), longest)
        return self._attend_first_slots(len(lengths), longest, None)

    def attend_slots(self, lengths: Tensor, longest: int) -> Attend:
        """Return `Attend` for the last token of each of the first slots, which hold `lengths` tokens (`[tokens]`), at
        most `longest`. The device alone reads `lengths`."""
        hidden = torch.arange(longest, device=self._device) >= lengths[:, None]
        mask = torch.zeros(len(lengths), 1, 1, longest, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden[:, None, None], float("-inf"))
        return self._attend_first_slots(len(lengths), longest, mask)

    def _attend_first_slots(self, n: int, longest: int, mask: Tensor | None) -> Attend:
        def attend(qkv: Tensor, layer: Tensor) -> Tensor:
            grouped = qkv[:, : self.heads].view(n, self.kv_heads, -1, self.head_dim)
            keys, values = self._keys_and_values(layer[:n, :longest])
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(n, -1)

        return attend

    def _attend_run(self, run: _Run, qkv: Tensor, layer: Tensor) -> Tensor:
        count, new, total = len(run.slots), run.new, run.cached + run.new
        span = slice(run.start, run.start + count * new)
        q = qkv[span, : self.heads].view(count, new, self.heads, self.head_dim).transpose(1, 2)
        if run.cached == 0:
            known = qkv[span, self.heads :].view(count, new, 2 * self.kv_heads, self.head_dim)
        else:
            known = layer[run.slots[0], None, :total] if count == 1 else layer[run.slots, :total]
            if self._copies_cache:
                known = known.clone(memory_format=torch.contiguous_format)
        mask = None
        keys, values = self._keys_and_values(known)
        if run.cached and new > 1:
            mask = torch.ones(new, total, dtype=torch.bool, device=self._device).tril(run.cached)
            if self._device.type != "cpu":
                # CUDA's fast kernels take either a mask or fewer key than query heads; else all scores are kept
                repeats = self.heads // self.kv_heads
                keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        attended = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=not run.cached, enable_gqa=self.heads > keys.shape[1]
        )
        return attended.transpose(1, 2).reshape(count * new, -1)

    def _keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split cache rows `[slots, length, ...]` into keys and values, `[slots, kv_heads, length, head_dim]` each."""
        heads = rows.transpose(1, 2)
        return heads[:, : self.kv_heads], heads[:, self.kv_heads :]


class _Run(msgspec.Struct, frozen=True):
    """Pieces of equal lengths, next to each other in the packed tokens."""

    start: int
    slots: list[int]
    cached: int
    new: int


def _runs(pieces: Sequence[SlotSpan]) -> list[_Run]:
    runs: list[_Run] = []
    start = 0
    for (cached, new), run in groupby(pieces, key=lambda piece: (piece.cached, piece.new)):
        slots = [piece.slot for piece in run]
        runs.append(_Run(start=start, slots=slots, cached=cached, new=new))
        start += len(slots) * new
    return runs


class NativeOperations:
    """`Operations` in C, with as many threads as torch has in the calling one."""

    def __init__(self, library: ctypes.CDLL, in_torch: TorchOperations) -> None:
        """`in_torch` has the model's shape."""
        self._library = library
        self._torch = in_torch

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x, out, width = x.contiguous(), torch.empty(x.shape, dtype=x.dtype), x.shape[-1]
        self._library.rms_norm(
            *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width),
            *(self._torch.eps, torch.get_num_threads()),
        )
        return out

    def rotate_and_store(self, positions: Tensor, rows: Tensor) -> RotateAndStore:
        a, rotation = self._torch, self._torch.rotation
        heads, threads = a.heads + 2 * a.kv_heads, torch.get_num_threads()
        positions, rows = positions.contiguous(), rows.contiguous()

        def rotate_and_store(qkv: Tensor, layer: Tensor) -> None:
            self._library.rotate_and_store(
                *(qkv.data_ptr(), heads, a.heads + a.kv_heads, 2 * a.kv_heads, a.head_dim),
                *(rotation.data_ptr(), rotation.shape[1], positions.data_ptr()),
                *(layer.data_ptr(), rows.data_ptr(), len(qkv), threads),
            )

        return rotate_and_store

    def attend(self, slots: Tensor, positions: Tensor, pieces: Sequence[SlotSpan]) -> Attend:
        a, tokens, threads = self._torch, len(slots), torch.get_num_threads()
        slots, positions = slots.contiguous(), positions.contiguous()

        def attend(qkv: Tensor, layer: Tensor) -> Tensor:
            out = torch.empty(tokens, a.heads * a.head_dim, dtype=qkv.dtype)
            self._library.attend_tokens(
                *(qkv.data_ptr(), qkv.stride(0), layer.data_ptr(), layer.stride(0), layer.stride(1)),
                *(slots.data_ptr(), positions.data_ptr(), out.data_ptr(), tokens),
                *(a.heads, a.kv_heads, a.head_dim, a.head_dim**-0.5, threads),
            )
            return out

        return attend


# --- Products ---------------------------------------------------------------------------------------------------------


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """Multiply `x` (`[rows, inputs]`) by `weight` (`[outputs, inputs]`) and add `bias` (`[outputs]`) and `added`
    (`[rows, outputs]`). Returns a new tensor."""
    found = F.linear(x, weight, bias)
    return found if added is None else found.add_(added)


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `x` (`[rows, inputs]`) by `weight` (`[2 * outputs, inputs]`); return silu of the first half of each row
    times the second half, `[rows, outputs]`."""
    return silu_and_multiply(F.linear(x, weight))


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return silu of the first half of each row times the second: `[rows, 2 * width]` → `[rows, width]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def has_native_products(dtype: torch.dtype) -> bool:
    """Return whether `pack`, `packed_product` and `packed_gated_product` can be called for `dtype`."""
    return library_for(dtype) is not None


def pack(weight: Tensor, *, gated: bool = False) -> Tensor:
    """Return `weight` (`[outputs, inputs]`) in the order in which the products in C read it; `gated`: for
    `packed_gated_product`."""
    library, parts = _library(weight.dtype), weight.chunk(2 if gated else 1)
    outputs, inputs = parts[0].shape
    packed = torch.empty(len(parts), library.packed_numbers(outputs, inputs), dtype=weight.dtype)
    for part, to in zip(parts, packed, strict=True):
        library.pack(part.data_ptr(), to.data_ptr(), outputs, inputs, torch.get_num_threads())
    return packed


def packed_product(
    x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None, added: Tensor | None = None
) -> Tensor:
    """`product` in C. What is computed of a row does not depend on the other rows."""
    x, (rows, inputs) = x.contiguous(), x.shape
    added = None if added is None else added.contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype)
    _library(x.dtype).product(
        *(x.data_ptr(), rows, inputs, packed.data_ptr(), outputs),
        *(None if bias is None else bias.data_ptr(), None if added is None else added.data_ptr()),
        *(out.data_ptr(), torch.get_num_threads()),
    )
    return out


def packed_gated_product(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """`gated_product` in C, `[rows, outputs]`."""
    x, (rows, inputs), (gates, rest) = x.contiguous(), x.shape, packed
    out = torch.empty(rows, outputs, dtype=x.dtype)
    _library(x.dtype).gated_product(
        *(x.data_ptr(), rows, inputs, gates.data_ptr(), rest.data_ptr(), outputs, out.data_ptr()),
        torch.get_num_threads(),
    )
    return out


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    library = library_for(dtype)
    assert library is not None, "`has_native_products` has not been asked"
    return library


# --- The library of layers and products -------------------------------------------------------------------------------

SOURCES = [FOLDER / name for name in ("layers.c", "products.c")]
HEADER = FOLDER / "numbers.h"
VECTORS = "avx512f"
"""What a processor must have for the C to be worthwhile, as Linux names it."""
FORMATS: dict[torch.dtype, Sequence[str]] = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
"""Number formats for which there is C, each with the compiler's options."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Relative to the largest entry."""

_P, _I, _FLOAT, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "attend_tokens": (_P, _I, _P, _I, _I, _P, _P, _P, _I, _I, _I, _I, _FLOAT, _THREADS),
    "gated_product": (_P, _I, _I, _P, _P, _I, _P, _THREADS),
    "pack": (_P, _P, _I, _I, _THREADS),
    "packed_numbers": (_I, _I),
    "product": (_P, _I, _I, _P, _I, _P, _P, _P, _THREADS),
    "rms_norm": (_P, _P, _P, _I, _I, _FLOAT, _THREADS),
    "rotate_and_store": (_P, _I, _I, _I, _I, _P, _I, _P, _P, _P, _I, _THREADS),
}
_RETURNS = {"packed_numbers": _I}


@cache
def library_for(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the functions of `SOURCES` for numbers of `dtype`, compiled first if need be; None: there are none.

    They work on vectors of 512 bits. For a processor without those, compilers take minutes to break them up, into
    code that is no gain.
    """
    if dtype not in FORMATS:
        return None
    if not has_instructions(VECTORS):
        log.info("the engine computes with torch alone: its C is for processors with %s", VECTORS)
        return None
    try:
        options = (*FORMATS[dtype], "-fopenmp", _openmp())
        library = ctypes.CDLL(str(shared_library(SOURCES, headers=[HEADER], options=options)))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _RETURNS.get(name)
        _check(library, dtype)
    except (Unavailable, OSError) as reason:
        log.warning("the engine does without C for this processor, which is slower: %s", reason)
        return None
    return library


def _openmp() -> str:
    """Return the OpenMP library that torch has loaded: with two of them, threads of each would wait for the other's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(r"(/.*/lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*)$", line)
        if found:
            return found[1]
    raise Unavailable("torch has no OpenMP library loaded")


def _check(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Raise `Unavailable` unless `library` computes on random numbers what the twins do.

    Products are not tried here, but with other libraries' (`gserver/embedded/products.py`).
    """
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, head_dim = 4, 2, 32
    rotation = torch.rand(2, 256, head_dim, generator=generator)
    qkv = torch.randn(3, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    layer = torch.randn(3, 200, 2 * kv_heads, head_dim, generator=generator).to(dtype)
    x, weight = torch.randn(7, 198, generator=generator).to(dtype), torch.randn(198, generator=generator).to(dtype)
    slots, positions, rows = torch.arange(3), torch.tensor([0, 69, 199]), torch.tensor([0, 269, 599])
    pieces = [SlotSpan(slot, position, 1) for slot, position in zip(range(3), (0, 69, 199), strict=True)]

    def in_torch(dtype: torch.dtype) -> TorchOperations:
        return TorchOperations(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=1e-5,
            rotation=rotation,
            dtype=dtype,
            device=torch.device("cpu"),
        )

    results: list[list[Tensor]] = []
    ways: list[tuple[Operations, torch.dtype]] = [
        (in_torch(torch.float32), torch.float32),
        (NativeOperations(library, in_torch(dtype)), dtype),
    ]
    for operations, to in ways:
        rotated, cache = qkv.to(to, copy=True), layer.to(to, copy=True)
        operations.rotate_and_store(positions, rows)(rotated, cache)
        attended = operations.attend(slots, positions, pieces)(rotated, cache)
        results.append([rotated, cache, attended, operations.rms_norm(x.to(to), weight.to(to))])
    for what, expected, found in zip(("rotation", "cache", "attention", "norm"), *results, strict=True):
        worst = (expected - found).abs().max().item()
        if not worst <= _TOLERANCE[dtype] * expected.abs().max().item():
            raise Unavailable(f"the compiled code is wrong: {what} is off by {worst:g}")
