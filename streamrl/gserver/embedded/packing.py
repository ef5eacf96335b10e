"""Matrix products with weights in the order in which the product reads them: packed once, not at every product.

streamrl's own (`products.c`) do it, and two libraries that come with torch. oneDNN packs float32, and bfloat16 where
the processor computes in it. MKL packs float32; on processors that are not Intel's it does without AVX512. Which of
them is the fastest is tried on the processor at hand, and whether they are right; `benchmarks/bench_engine.py` measures
the engine with them.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from streamrl.device import processor_has_bfloat16
from streamrl.gserver.embedded.compiled import FORMATS, library_for
from streamrl.gserver.embedded.kernels import silu_times

log = logging.getLogger(__name__)


class Packing(Protocol):
    """One library's products."""

    name: str
    fewest_rows: int
    """With fewer the weights as they are serve as well."""

    def can(self, dtype: torch.dtype) -> bool:
        """Whether this torch and this processor offer it."""

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:
        """What `product`, or `gated_product`, needs of `weight` (`[outputs, inputs]`), which stays as it is.

        With MKL best made with as many threads as compute with it: it divides the work when it packs.
        """

    def product(
        self, x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor:
        """`[rows, inputs]` → `[rows, outputs]`, a new tensor, which `bias` and `added` (`[rows, outputs]`) are added
        to."""

    def gated_product(
        self, x: Tensor, packed: Tensor, weight: Tensor, silu_times: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`[rows, inputs]` → `[rows, outputs / 2]`: `silu_times` (`Kernels`) of the product."""
        return silu_times(self.product(x, packed, weight))


class Compiled(Packing):
    """streamrl's own, where there is a C compiler (`compiled.py`). A row's product does not depend on the others."""

    name = "products.c"
    fewest_rows = 1

    def can(self, dtype: torch.dtype) -> bool:
        return dtype in FORMATS and library_for(dtype) is not None

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:
        library, parts = _library(weight.dtype), weight.chunk(2 if gated else 1)
        outputs, inputs = parts[0].shape
        packed = torch.empty(len(parts), library.packed_numbers(outputs, inputs), dtype=weight.dtype)
        for part, to in zip(parts, packed, strict=True):
            library.pack(part.data_ptr(), to.data_ptr(), outputs, inputs, torch.get_num_threads())
        return packed

    def product(
        self, x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor:
        x, (rows, inputs), outputs = x.contiguous(), x.shape, weight.shape[0]
        added = None if added is None else added.contiguous()
        product = torch.empty(rows, outputs, dtype=x.dtype)
        _library(x.dtype).product(
            *(x.data_ptr(), rows, inputs, packed.data_ptr(), outputs),
            *(None if bias is None else bias.data_ptr(), None if added is None else added.data_ptr()),
            *(product.data_ptr(), torch.get_num_threads()),
        )
        return product

    def gated_product(
        self, x: Tensor, packed: Tensor, weight: Tensor, silu_times: Callable[[Tensor], Tensor]
    ) -> Tensor:
        x, (rows, inputs), outputs, (gates, rest) = x.contiguous(), x.shape, weight.shape[0] // 2, packed
        product = torch.empty(rows, outputs, dtype=x.dtype)
        _library(x.dtype).gated_product(
            *(x.data_ptr(), rows, inputs, gates.data_ptr(), rest.data_ptr(), outputs, product.data_ptr()),
            torch.get_num_threads(),
        )
        return product


class OneDNN(Packing):
    """Makes code for each number of rows that it meets, which takes about half a millisecond once."""

    name = "oneDNN"
    fewest_rows = 1

    def can(self, dtype: torch.dtype) -> bool:
        known = dtype == torch.float32 or (dtype == torch.bfloat16 and processor_has_bfloat16())
        built_in: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        return known and built_in and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        return packed

    def product(
        self, x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
        return product if added is None else product.add_(added)


class MKL(Packing):
    """Float32 only."""

    name = "MKL"
    fewest_rows = 4

    def can(self, dtype: torch.dtype) -> bool:
        built_in: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        return dtype == torch.float32 and built_in and hasattr(torch.ops.mkl, "_mkl_linear")

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:
        packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        return packed

    def product(
        self, x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor:
        # The last argument is not what was packed for: torch uses `packed` only if it is the number of rows of `x`.
        product: Tensor = torch.ops.mkl._mkl_linear.default(x, packed, weight, bias, x.shape[0])
        return product if added is None else product.add_(added)


PACKINGS: Sequence[Packing] = (Compiled(), OneDNN(), MKL())

_PACKED_FOR_ROWS = 192
"""A hint: packed weights serve for any number of rows, and `_is_right` tries many."""
_TRIED_SHAPES = ((96, 64), (48, 1536), (1030, 80))
"""Outputs and inputs."""
_TRIED_ROWS = (1, 4, 5, 31, 32, 64, 65, 255, 256, 257, 600)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Relative to the largest entry, several times what rounding does to sums of 1536 products."""
_TIMED_SHAPE, _TIMED_ROWS, _TIMES = (1536, 576), 64, 10


def can_pack(dtype: torch.dtype) -> bool:
    """Whether any library may do it."""
    return any(packing.can(dtype) for packing in PACKINGS)


@cache
def packing_for(dtype: torch.dtype, threads: int, *, deterministic: bool = False) -> Packing | None:
    """The fastest of those whose products are right with `threads` threads (those set at present); None: there is none.

    `deterministic`: the first of them, because they round differently, and which is the fastest may depend on the hour.
    """
    right = [packing for packing in PACKINGS if packing.can(dtype) and _is_right(packing, dtype, threads)]
    if not right or deterministic or len(right) == 1:
        return right[0] if right else None
    seconds = {packing.name: _seconds(packing, dtype) for packing in right}
    log.info("a product takes %s", " and ".join(f"{name} {1e6 * taken:.0f} µs" for name, taken in seconds.items()))
    return min(right, key=lambda packing: seconds[packing.name])


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    library = library_for(dtype)
    assert library is not None, "`can` has not been asked"
    return library


def _is_right(packing: Packing, dtype: torch.dtype, threads: int) -> bool:
    """Whether packed products equal plain ones."""
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in _TRIED_SHAPES:
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        packed, packed_gated = packing.pack(weight), packing.pack(weight, gated=True)
        for rows in _TRIED_ROWS:
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            expected = F.linear(x.float(), weight.float())
            gated = packing.gated_product(x, packed_gated, weight, silu_times)
            for found, right in (
                (packing.product(x, packed, weight), expected),
                (gated, silu_times(expected)),
            ):
                worst = (found - right).abs().max().item()
                if not worst <= _TOLERANCE[dtype] * right.abs().max().item():
                    log.warning(
                        "%s packs no matrices here: with %d threads its product of %d rows, %d inputs and %d outputs "
                        "is off by %g",
                        *(packing.name, threads, rows, inputs, outputs, worst),
                    )
                    return False
    return True


def _seconds(packing: Packing, dtype: torch.dtype) -> float:
    """Of one product, the fastest of several."""
    outputs, inputs = _TIMED_SHAPE
    weight, x = torch.ones(outputs, inputs, dtype=dtype), torch.ones(_TIMED_ROWS, inputs, dtype=dtype)
    packed = packing.pack(weight)
    taken = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        packing.product(x, packed, weight)
        taken.append(time.perf_counter() - began)
    return min(taken)
