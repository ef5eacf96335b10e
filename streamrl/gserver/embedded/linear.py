"""A matrix that is multiplied with: its weights as Hugging Face lays them out, and a packed copy where that is faster.

MKL packs a matrix once into the order in which its float32 product reads it, instead of at every product. The weights
stay what they are: packing reads them. Invariant: a product never uses a packed copy of earlier weights; whoever is
about to write calls `unpack` first, and `pack` after it.

It is faster from a few rows on; for a row alone the weights as they are serve as well. `benchmarks/bench_engine.py`
measures the engine with it.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

PACKED_FOR_ROWS = 192
"""Named to MKL when it packs. Its documentation does not tie it to the rows of a product, and `packs_exactly` tries."""
FEWEST_ROWS = 4
"""With fewer the weights are used as they are."""
HOST_SHARE = 0.25
"""Of the host's memory, that packed copies of both sets of weights may take."""

_TRIED_SHAPES = ((96, 64), (48, 1536), (1030, 80))
"""Outputs and inputs."""
_TRIED_ROWS = (4, 5, 31, 32, 64, 65, 255, 256, 257, 600)
_TOLERANCE = 1e-4
"""Relative to the largest entry, several times what rounding does to sums of 1536 products."""


class Matrix:
    """`weight` (`[outputs, inputs]`) and perhaps a packed copy of it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._packed: Tensor | None = None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[rows, inputs]` → `[rows, outputs]`, a new tensor."""
        packed = self._packed  # another thread may set it at any time
        if packed is None or x.shape[0] < FEWEST_ROWS:
            return F.linear(x, self.weight, bias)
        return _packed_product(x, packed, self.weight, bias)

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def unpack(self) -> None:
        """Forget the packed copy: the weights are about to change."""
        self._packed = None

    def pack(self) -> None:
        """Best with as many threads as compute with it: MKL divides the work when it packs."""
        self._packed = _pack(self.weight)


def packs(*, numbers: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices of so many numbers altogether, held twice, should be packed."""
    if dtype != torch.float32 or device.type != "cpu" or not has_packed_products():
        return False
    needed, memory = 2 * numbers * dtype.itemsize, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > HOST_SHARE * memory:
        log.warning(
            "matrices are not packed, so products of 4 requests and more take about twice as long: packed copies would "
            "take %.1f GiB, more than a quarter of this host's %.1f GiB",
            needed / 2**30,
            memory / 2**30,
        )
        return False
    return True


def has_packed_products() -> bool:
    """Whether this torch offers MKL's."""
    built_with_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return built_with_mkl and hasattr(torch.ops.mkl, "_mkl_linear")


@cache
def packs_exactly(threads: int) -> bool:
    """Whether packed products equal plain ones, packed and computed with `threads` threads (those set at present)."""
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in _TRIED_SHAPES:
        weight = torch.randn(outputs, inputs, generator=generator)
        packed = _pack(weight)
        for rows in _TRIED_ROWS:
            x = torch.randn(rows, inputs, generator=generator)
            expected = F.linear(x, weight)
            worst = (_packed_product(x, packed, weight, None) - expected).abs().max().item()
            if not worst <= _TOLERANCE * expected.abs().max().item():
                log.warning(
                    "matrices are not packed: with %d threads MKL's packed product of %d rows, %d inputs and %d "
                    "outputs is off by %g",
                    *(threads, rows, inputs, outputs, worst),
                )
                return False
    return True


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return packed


def _packed_product(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The last argument is not what was packed for: with any number but the rows of `x` torch would not use `packed`.
    product: Tensor = torch.ops.mkl._mkl_linear.default(x, packed, weight, bias, x.shape[0])
    return product
