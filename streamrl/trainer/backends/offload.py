"""Memory of tensors kept on the CPU for a while; the tensors, and all views of them, stay valid objects.

It is the same on every device: where tensors are on the CPU anyway, their memory is given back and copied, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Offloaded:
    """The memory under some tensors, moved away on construction."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            copy = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            copy.copy_(storage)
            self._copies.append((storage, copy))
            storage.resize_(0)

    def bring_back(self) -> None:
        """Fill the memory as it was."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._copies.clear()
