"""Checksums of weights: equal names, dtypes, shapes and bytes give equal checksums, on any machine.

`weights_checksum` is a cryptographic hash of every byte. `tensor_sums` reads a tensor at memory speed, on its device
and in its layout; it detects accidental errors.

SGLang's processes import this module too, so it depends only on packages in SGLang's environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from streamrl.native.operations import INTEGERS, add_sums, native_add_sums


class WeightsChecksum(msgspec.Struct, frozen=True):
    """The reply to POST /weights_checker: compare `total`, and look at `tensors` if it differs."""

    dtype: str
    """Dtype of the weights as served, for example `float32`; several are joined with `+`."""
    total: str
    """Over all tensors in the order of their names."""
    tensors: dict[str, str]
    """Hugging Face name → checksum of its dtype, shape and bytes."""


def weights_checksum(weights: Mapping[str, Tensor]) -> WeightsChecksum:
    """Return the checksum of `weights` (Hugging Face name → tensor); the caller leaves out a tied `lm_head.weight`."""
    tensors = {name: _tensor_checksum(tensor) for name, tensor in weights.items()}
    dtypes = sorted({dtype_name(tensor.dtype) for tensor in weights.values()})
    return joint_checksum(tensors, dtype="+".join(dtypes))


def joint_checksum(tensors: Mapping[str, str], *, dtype: str) -> WeightsChecksum:
    """Return the checksum of weights of `dtype` with the checksums `tensors` (Hugging Face name → checksum)."""
    ordered = {name: tensors[name] for name in sorted(tensors)}
    total = hashlib.blake2b(digest_size=16)
    for name, checksum in ordered.items():
        total.update(f"{name}={checksum}\n".encode())
    return WeightsChecksum(dtype=dtype, total=total.hexdigest(), tensors=ordered)


def _tensor_checksum(tensor: Tensor) -> str:
    digest = _digest_of_shape(tensor)
    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def make_ready() -> None:
    """Compile the code of the sums now, not at their first use."""
    native_add_sums()


class LineSums(NamedTuple):
    """The sums of the rows and of the columns of a tensor, as integers on its device; `checksums` reads them."""

    digest: hashlib.blake2b
    """Of the tensor's dtype and shape."""
    columns: Tensor
    rows: Tensor


def tensor_sums(tensor: Tensor) -> str:
    """Return a checksum of one tensor: a hash of the sums of its rows and of its columns. Numbers count as the integers
    with the same bits, modulo two to the power of their width.

    Any error in a single number changes the checksum; so do numbers, rows or columns that have changed places.
    """
    return checksums({"": line_sums(tensor)})[""]


def checksums(sums: Mapping[str, LineSums]) -> dict[str, str]:
    """Return `tensor_sums` of each tensor, by name. One copy reads all sums from their device, so the host waits for it
    once."""
    if not sums:
        return {}
    parts = [part.view(torch.uint8) for found in sums.values() for part in (found.columns, found.rows)]
    read = torch.split(torch.cat(parts).cpu(), [len(part) for part in parts])
    hashed = {}
    for (name, found), columns, rows in zip(sums.items(), read[::2], read[1::2], strict=True):
        digest = found.digest.copy()
        digest.update(columns.numpy().data)
        digest.update(rows.numpy().data)
        hashed[name] = digest.hexdigest()
    return hashed


def line_sums(tensor: Tensor) -> LineSums:
    """Return the sums of `tensor`, without waiting for its device."""
    return _sums(tensor.detach(), None)


def copy_and_sum(target: Tensor, source: Tensor) -> LineSums:
    """Copy `source` into the contiguous `target`; return the sums of `target` afterwards.

    Cheaper than a copy followed by the sums: each piece is summed while it is in the processor's cache.
    """
    return _sums(target, source.detach())


PIECE_BYTES = 2**20
"""Data that are read twice are read in pieces of this size, so that the second read hits the cache."""


def _sums(tensor: Tensor, source: Tensor | None) -> LineSums:
    """Return the sums of `tensor`, after copying `source` into it, if given."""
    numbers = _as_matrix(tensor)
    matrix = numbers.view(INTEGERS[tensor.element_size()])
    if not has_cache(tensor.device):
        if source is not None:
            tensor.copy_(source)
        by_column, by_row = (torch.sum(matrix, dim, dtype=matrix.dtype) for dim in (0, 1))
        return LineSums(_digest_of_shape(tensor), by_column, by_row)
    native = native_add_sums() if matrix.is_contiguous() else None
    add = native or add_sums
    read_once = native is not None and source is None
    rows = matrix.shape[0] if read_once else _rows_in_a_piece(matrix, arrays=1 if source is None else 2)
    row_sums, column_sums = matrix.new_empty(matrix.shape[0]), matrix.new_zeros(matrix.shape[1])
    targets = torch.split(numbers, rows)
    sources = targets if source is None else torch.split(_as_matrix(source), rows)
    # Few calls per piece: each needs the interpreter lock, which other threads also use.
    for i, (piece, sums) in enumerate(zip(torch.split(matrix, rows), torch.split(row_sums, rows), strict=True)):
        if source is not None:
            targets[i].copy_(sources[i])
        add(piece, sums, column_sums)
    return LineSums(_digest_of_shape(tensor), column_sums, row_sums)


def has_cache(device: torch.device) -> bool:
    """Return whether tensors are summed in pieces that fit the cache. On a GPU each piece costs several launches."""
    return device.type == "cpu"


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)


def _rows_in_a_piece(matrix: Tensor, *, arrays: int) -> int:
    """Return how many rows of `arrays` arrays of the shape of `matrix` fit into `PIECE_BYTES` together."""
    return max(1, PIECE_BYTES // max(1, arrays * matrix.shape[1] * matrix.element_size()))


def _digest_of_shape(tensor: Tensor) -> hashlib.blake2b:
    return hashlib.blake2b(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode(), digest_size=16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
