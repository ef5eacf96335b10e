"""Fingerprints of weights: equal names, dtypes, shapes and bytes give equal answers, on any machine.

`weights_checksum` is a cryptographic hash of every byte. `tensor_sums` reads a tensor at the speed of memory, on
the device and in the layout in which it lies, and is meant for what goes wrong by accident. On a CPU C takes the sums
(`checksum.c`) in one pass over the memory; where it cannot be compiled, and elsewhere, torch does, in two.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import msgspec
import torch
from torch import Tensor

log = logging.getLogger(__name__)


class WeightsChecksum(msgspec.Struct, frozen=True):
    """What POST /weights_checker answers; compare `total`, look at `tensors` when it differs."""

    dtype: str
    """Of the weights as served, for example `float32`; several are joined with `+`."""
    total: str
    """Over all tensors in the order of their names."""
    tensors: dict[str, str]
    """Hugging Face name → checksum of its dtype, shape and bytes."""


def weights_checksum(weights: Mapping[str, Tensor]) -> WeightsChecksum:
    """Checksum of `weights`, by Hugging Face name; a tied `lm_head.weight` must be left out by the caller."""
    tensors = {name: _tensor_checksum(weights[name]) for name in sorted(weights)}
    total = hashlib.blake2b(digest_size=16)
    for name, checksum in tensors.items():
        total.update(f"{name}={checksum}\n".encode())
    dtypes = sorted({dtype_name(tensor.dtype) for tensor in weights.values()})
    return WeightsChecksum(dtype="+".join(dtypes), total=total.hexdigest(), tensors=tensors)


def make_ready() -> None:
    """Have what takes the sums compiled now, and not when the first are wanted."""
    _add_by_c()


def tensor_sums(tensor: Tensor) -> str:
    """Checksum of one tensor: a hash of the sums of its rows and of its columns, where numbers are taken as the
    integers that their bits spell, modulo two to the power of their width.

    Any error in one number changes it, as do numbers, rows or columns that have changed places.
    """
    return _sums(tensor.detach(), None)


def copy_and_sum(target: Tensor, source: Tensor) -> str:
    """Copy `source` into `target`, which is contiguous; answers `tensor_sums` of what `target` then holds.

    Cheaper than one after the other: each piece is summed while it lies in the cache.
    """
    return _sums(target, source.detach())


PIECE_BYTES = 2**20
"""What is read twice is read so much at a time, to find it in the processor's cache the second time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes → integer of that width."""

AddSums = Callable[[Tensor, Tensor, Tensor], None]
"""Write the sums of the rows of a matrix (`[rows, columns]`) to the second (`[rows]`), add those of its columns to the
third (`[columns]`), all integers of the same width."""


def _sums(tensor: Tensor, source: Tensor | None) -> str:
    """`tensor_sums`, after `source`, if there is one, was copied into `tensor`."""
    numbers = _as_matrix(tensor)
    matrix = numbers.view(_INTEGERS[tensor.element_size()])
    by_c = _add_by_c() if tensor.device.type == "cpu" and matrix.is_contiguous() else None
    add_sums = by_c or _add_by_torch
    read_once = by_c is not None and source is None
    rows = matrix.shape[0] if read_once else _rows_at_once(matrix, arrays=1 if source is None else 2)
    of_rows, of_columns = matrix.new_empty(matrix.shape[0]), matrix.new_zeros(matrix.shape[1])
    targets = torch.split(numbers, rows)
    sources = targets if source is None else torch.split(_as_matrix(source), rows)
    # Few calls for each piece: they take turns with those of other threads, for the interpreter's lock.
    for i, (piece, sums) in enumerate(zip(torch.split(matrix, rows), torch.split(of_rows, rows), strict=True)):
        if source is not None:
            targets[i].copy_(sources[i])
        add_sums(piece, sums, of_columns)
    digest = hashlib.blake2b(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode(), digest_size=16)
    for found in (of_columns, of_rows):
        digest.update(found.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _add_by_torch(matrix: Tensor, of_rows: Tensor, of_columns: Tensor) -> None:
    torch.sum(matrix, 1, dtype=matrix.dtype, out=of_rows)
    of_columns += torch.sum(matrix, 0, dtype=matrix.dtype)


@cache
def _add_by_c() -> AddSums | None:
    """Contiguous matrices only; None: it cannot be had here."""
    try:
        from streamrl.native import Unavailable, compiled  # what it needs is not in every environment of SGLang
    except ImportError as reason:
        log.info("torch takes the checksums of weights, which is slower: %s", reason)
        return None
    try:
        library = ctypes.CDLL(str(compiled([Path(__file__).with_name("checksum.c")])))
        functions = {size: getattr(library, f"sums_of_{size}") for size in _INTEGERS}
    except (Unavailable, OSError) as reason:
        log.info("torch takes the checksums of weights, which is slower: %s", reason)
        return None
    for function in functions.values():
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        function.restype = None

    def add(matrix: Tensor, of_rows: Tensor, of_columns: Tensor) -> None:
        functions[matrix.element_size()](matrix.data_ptr(), *matrix.shape, of_rows.data_ptr(), of_columns.data_ptr())

    for integer in _INTEGERS.values():
        tried = torch.arange(-600, 610).view(10, 121).to(integer)
        if not torch.equal(_added(add, tried), _added(_add_by_torch, tried)):
            log.warning("torch takes the checksums of weights: what the C compiler makes is wrong for %s", integer)
            return None
    return add


def _added(add_sums: AddSums, matrix: Tensor) -> Tensor:
    """Sums of rows and columns, one after another."""
    of_rows, of_columns = matrix.new_empty(matrix.shape[0]), matrix.new_zeros(matrix.shape[1])
    add_sums(matrix, of_rows, of_columns)
    return torch.cat([of_rows, of_columns])


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)


def _rows_at_once(matrix: Tensor, *, arrays: int) -> int:
    """So many rows are worked on together, of as many `arrays` of the same shape."""
    if matrix.device.type != "cpu":
        return matrix.shape[0]
    return max(1, PIECE_BYTES // max(1, arrays * matrix.shape[1] * matrix.element_size()))


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _tensor_checksum(tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
