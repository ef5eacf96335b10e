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
    matrix = tensor.detach().reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
    integers = matrix.view(_INTEGERS[tensor.element_size()])
    digest = hashlib.blake2b(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode(), digest_size=16)
    for dimension in (0, 1):
        sums = integers.sum(dimension, dtype=integers.dtype).cpu().contiguous()
        digest.update(sums.view(torch.uint8).numpy().data)
    return digest.hexdigest()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes → integer of that width."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _tensor_checksum(tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
