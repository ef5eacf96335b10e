"""Find where the host waits for the device within a computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
OF_UNKNOWN_SIZE = {
    *(aten.nonzero.default, aten.masked_select.default, aten.bincount.default, aten._unique2.default),
    *(aten.unique_consecutive.default, aten.unique_dim.default, aten.repeat_interleave.Tensor),
}
"""The host has to know their values to make the result."""
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}


class _Watch(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = function in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if function in OF_UNKNOWN_SIZE | READS or by_mask:
            self._found.append(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Fill the list with what makes the host wait for a device. On the CPU, where nothing has to wait, with all that
    would on a GPU; on CUDA the first one is an error."""
    found: list[str] = []
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with pytest.MonkeyPatch.context() as patch, _Watch(found):
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, _noted(name, getattr(torch.Tensor, name), found))
        yield found


def _noted(name: str, method: Any, found: list[str]) -> Any:
    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found.append(name)
        return method(tensor, *args, **options)

    return noted
