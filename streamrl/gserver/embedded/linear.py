"""A matrix that is multiplied with: its weights as Hugging Face lays them out, and a packed copy where that is faster.

The weights stay what they are: packing (`packing.py`) reads them. Invariant: a product never uses a packed copy of
earlier weights; whoever is about to write calls `unpack` first, and `pack` after it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from streamrl.gserver.embedded.packing import Packing, can_pack

log = logging.getLogger(__name__)

HOST_SHARE = 0.25
"""Of the host's memory, that packed copies of both sets of weights may take."""


class Matrix:
    """`weight` (`[outputs, inputs]`) and perhaps a packed copy of it."""

    def __init__(self, weight: Tensor, *, gated: bool = False) -> None:
        """`gated`: it is asked for `gated`, and not called."""
        self.weight = weight
        self._gated = gated
        self._packed: tuple[Packing, Tensor] | None = None

    def __call__(self, x: Tensor, bias: Tensor | None = None, *, added: Tensor | None = None) -> Tensor:
        """`[rows, inputs]` → `[rows, outputs]`, a new tensor, which `bias` and `added` (`[rows, outputs]`) are added
        to."""
        found = self._packed  # another thread may set it at any time
        if found is None or x.shape[0] < found[0].fewest_rows:
            product = F.linear(x, self.weight, bias)
            return product if added is None else product.add_(added)
        packing, packed = found
        return packing.product(x, packed, self.weight, bias, added)

    def gated(self, x: Tensor, silu_times: Callable[[Tensor], Tensor]) -> Tensor:
        """`[rows, inputs]` → `[rows, outputs / 2]`: `silu_times` (`Kernels`) of the product."""
        found = self._packed
        if found is None or x.shape[0] < found[0].fewest_rows:
            return silu_times(F.linear(x, self.weight))
        packing, packed = found
        return packing.gated_product(x, packed, self.weight, silu_times)

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def unpack(self) -> None:
        """Forget the packed copy: the weights are about to change."""
        self._packed = None

    def pack(self, packing: Packing) -> None:
        self._packed = packing, packing.pack(self.weight, gated=self._gated)


def packs(*, numbers: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices of so many numbers altogether, held twice, should be packed."""
    if device.type != "cpu" or not can_pack(dtype):
        return False
    needed, memory = 2 * numbers * dtype.itemsize, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > HOST_SHARE * memory:
        log.warning(
            "matrices are not packed, so products are slower: packed copies would take %.1f GiB, more than a quarter "
            "of this host's %.1f GiB",
            needed / 2**30,
            memory / 2**30,
        )
        return False
    return True
