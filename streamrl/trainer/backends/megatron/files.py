"""Tensors in safetensors files: read one by one, written one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamrl.errors import ModelError

HEADER_ALIGNMENT = 8


def tensor_names(path: Path) -> set[str]:
    """Of all tensors in one file; raises `ModelError` when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_tensors(
    paths: Iterable[Path], names: Iterable[str], *, absent: Callable[[str], Tensor | None] = lambda _: None
) -> Iterator[tuple[str, Tensor]]:
    """Those of `names` that lie in the files, whole, on the CPU; `absent` may give one that does not.

    Raises `ModelError` when a tensor is missing or a file cannot be read.
    """
    with ExitStack() as files:
        places: dict[str, Any] = {}
        for path in sorted(paths):
            try:
                file = files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from error
            places |= dict.fromkeys(file.keys(), file)
        for name in names:
            tensor = places[name].get_tensor(name) if name in places else absent(name)
            if tensor is None:
                raise ModelError(f"no tensor {name} in {', '.join(map(str, sorted(paths))) or 'any file'}")
            yield name, tensor


def write_tensors(
    path: Path, shapes: Iterable[tuple[str, tuple[int, ...]]], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write float32 `tensors`, named and shaped as `shapes` says, in that order, each as it comes.

    The format: https://huggingface.co/docs/safetensors (length of the header, header in JSON, bytes).
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes:
        size = 4
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for (name, expected), (given, tensor) in zip(header.items(), tensors, strict=True):
            if name != given or list(tensor.shape) != expected["shape"]:
                raise ValueError(f"{name} {expected['shape']} is to be written, but {given} {tuple(tensor.shape)} came")
            file.write(tensor.float().contiguous().cpu().numpy().astype("<f4", copy=False).tobytes())
