"""Fingerprints of weights: equal names, dtypes, shapes and bytes give equal answers, on any machine.

`weights_checksum` is a cryptographic hash of every byte. `tensor_sums` reads a tensor at the speed of memory, on
the device and in the layout in which it lies, and is meant for what goes wrong by accident.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor


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


def _sums(tensor: Tensor, source: Tensor | None) -> str:
    """`tensor_sums`, after `source`, if there is one, was copied into `tensor`."""
    numbers = _as_matrix(tensor)
    matrix = numbers.view(_INTEGERS[tensor.element_size()])
    rows = _rows_at_once(matrix, arrays=1 if source is None else 2)
    pieces = torch.split(matrix, rows)
    of_rows = matrix.new_empty(matrix.shape[0])
    of_columns = matrix.new_empty(len(pieces), matrix.shape[1])
    targets = torch.split(numbers, rows)
    sources = targets if source is None else torch.split(_as_matrix(source), rows)
    # Few calls for each piece: they take turns with those of other threads, for the interpreter's lock.
    for i, (piece, sums) in enumerate(zip(pieces, torch.split(of_rows, rows), strict=True)):
        if source is not None:
            targets[i].copy_(sources[i])
        torch.sum(piece, 1, dtype=matrix.dtype, out=sums)
        torch.sum(piece, 0, dtype=matrix.dtype, out=of_columns[i])
    digest = hashlib.blake2b(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode(), digest_size=16)
    for found in (of_columns.sum(0, dtype=matrix.dtype), of_rows):
        digest.update(found.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
