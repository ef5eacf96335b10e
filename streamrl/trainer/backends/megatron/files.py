"""Tensors in safetensors files, read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamrl.errors import ModelError


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
