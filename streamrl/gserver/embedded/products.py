"""Matrix products with packed weights: reordered once for the product's access pattern, not at every product.

A `Matrix` keeps its weights in Hugging Face's layout and in addition, where that is faster, a packed copy for the
products of one of three libraries: streamrl's own C (`native/operations.py`), and oneDNN and MKL, which come with
torch. A trial on the present processor checks their products and finds the fastest one. A `Packer` packs in a separate
thread while others compute. `benchmarks/bench_engine.py --native` also measures without them.

Invariant: a product never uses a packed copy of earlier weights. Code that writes weights unpacks the matrix first, and
packs it again afterwards.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from streamrl.device import compute_with, processor_has_bfloat16
from streamrl.native import operations
from streamrl.native.operations import silu_and_multiply

log = logging.getLogger(__name__)


class Matrix:
    """`weight` (`[outputs, inputs]`), and a packed copy of it if it is packed."""

    def __init__(self, weight: Tensor, *, gated: bool = False) -> None:
        """`gated`: `gated` is called instead of the matrix itself; `weight` is `[2 * outputs, inputs]`, gates first."""
        self.weight = weight
        self._gated = gated
        self._packed: tuple[ProductLibrary, Tensor] | None = None

    def __call__(self, x: Tensor, bias: Tensor | None = None, *, added: Tensor | None = None) -> Tensor:
        """Return the product of `x` (`[rows, inputs]`) and the matrix, plus `bias` (`[outputs]`) and `added`
        (`[rows, outputs]`): a new tensor, `[rows, outputs]`."""
        found = self._packed  # another thread may set it at any time
        if found is None or x.shape[0] < found[0].fewest_rows:
            return operations.product(x, self.weight, bias, added)
        library, packed = found
        return library.product(x, packed, self.weight, bias, added)

    def plain(self, x: Tensor) -> Tensor:
        """Return the product of `x` and the unpacked matrix, also if it is packed for `gated`: new, `[rows,
        outputs]`."""
        return operations.product(x, self.weight)

    def gated(self, x: Tensor) -> Tensor:
        """Return silu of the first half of each row of the product, times its second half: `[rows, outputs]`."""
        found = self._packed
        if found is None or x.shape[0] < found[0].fewest_rows:
            return operations.gated_product(x, self.weight)
        library, packed = found
        return library.gated_product(x, packed, self.weight)

    @property
    def packed(self) -> bool:
        """Whether there is a packed copy of the present weights."""
        return self._packed is not None

    def unpack(self) -> None:
        """Drop the packed copy, since the weights are about to change."""
        self._packed = None

    def pack(self, library: ProductLibrary) -> None:
        """Make a packed copy for the products of `library`."""
        self._packed = library, library.pack(self.weight, gated=self._gated)


# --- Packing ----------------------------------------------------------------------------------------------------------

HOST_SHARE = 0.25
"""Share of the host's memory that packed copies of both sets of weights may take."""


def packs(*, numbers: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether to pack matrices with `numbers` entries in total, which are kept twice."""
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


class Packer:
    """Packs matrices one after another in a separate thread. Called by one thread at a time.

    The thread has as many helpers as the computing one: MKL's products are slower from a copy packed with fewer. It
    ends with the last matrix, and its helpers with it, because idle helpers slow down those of other threads (see
    `device.compute_with`).
    """

    def __init__(self, *, threads: int, deterministic: bool = False) -> None:
        """`threads`: number of threads that compute. `deterministic`: see `choose_library`."""
        self._threads = threads
        self._deterministic = deterministic
        self._packing: dict[Matrix, Future[None]] = {}
        self._failed = False
        """Whether one of the matrices that were started last could not be packed."""

    def start(self, matrices: Iterable[Matrix]) -> None:
        """Begin to pack the unpacked ones of `matrices`."""
        missing = [matrix for matrix in matrices if not matrix.packed and matrix not in self._packing]
        if not missing:
            return
        self._failed = False
        pool = ThreadPoolExecutor(1, "packing", initializer=compute_with, initargs=(self._threads,))
        self._packing |= {matrix: pool.submit(self._pack, matrix) for matrix in missing}
        pool.shutdown(wait=False)

    def unpack(self, matrix: Matrix) -> None:
        """Drop the packed copy of `matrix`; once this returns, no thread is packing it either."""
        packing = self._packing.pop(matrix, None)
        if packing is not None and not packing.cancel():
            packing.result()
        matrix.unpack()

    def finish(self) -> None:
        """Wait until all started matrices are packed."""
        for packing in self._packing.values():
            packing.result()
        self._packing.clear()

    def stop(self) -> None:
        """Finish the matrix that is being packed now, and pack no others."""
        self._packing = {matrix: packing for matrix, packing in self._packing.items() if not packing.cancel()}

    def _pack(self, matrix: Matrix) -> None:
        try:
            if self._failed:
                return
            library = choose_library(matrix.weight.dtype, self._threads, deterministic=self._deterministic)
            if library is not None:
                matrix.pack(library)
        except RuntimeError as error:  # most likely no memory is left, nor is there any for the others
            self._failed = True
            log.warning("matrices of these weights are not packed, so products are slower: %s", error)


# --- Libraries --------------------------------------------------------------------------------------------------------


class ProductLibrary(Protocol):
    """A library of products with packed weights."""

    name: str
    fewest_rows: int
    """Least number of rows for which packed weights are faster."""

    def can(self, dtype: torch.dtype) -> bool:
        """Return whether this torch and this processor support it."""

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:
        """Return the packed form of `weight` (`[outputs, inputs]`) for `product` or `gated_product`.

        MKL divides the work when it packs, so this is best called with as many threads as compute.
        """

    def product(
        self, x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor:
        """Return the same as `operations.product`."""

    def gated_product(self, x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
        """Return the same as `operations.gated_product`."""
        return silu_and_multiply(self.product(x, packed, weight))


class Native(ProductLibrary):
    """streamrl's own C. The result for a row does not depend on the other rows."""

    name = "products.c"
    fewest_rows = 1

    def can(self, dtype: torch.dtype) -> bool:
        return operations.has_native_products(dtype)

    def pack(self, weight: Tensor, *, gated: bool = False) -> Tensor:
        return operations.pack(weight, gated=gated)

    def product(
        self, x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor:
        return operations.packed_product(x, packed, weight.shape[0], bias, added)

    def gated_product(self, x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
        return operations.packed_gated_product(x, packed, weight.shape[0] // 2)


class OneDNN(ProductLibrary):
    """Packs float32, and bfloat16 if the processor computes in it.

    It generates code for each new number of rows, which takes about half a millisecond once.
    """

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


class MKL(ProductLibrary):
    """Packs float32; on processors not made by Intel it uses no AVX512."""

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
        # The last argument is not `_PACKED_FOR_ROWS`: torch uses `packed` only if it equals the number of rows of `x`.
        product: Tensor = torch.ops.mkl._mkl_linear.default(x, packed, weight, bias, x.shape[0])
        return product if added is None else product.add_(added)


LIBRARIES: Sequence[ProductLibrary] = (Native(), OneDNN(), MKL())

_PACKED_FOR_ROWS = 192
"""A hint: packed weights serve for any number of rows, and `_is_right` tries many."""


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether any library packs matrices of `dtype`."""
    return any(library.can(dtype) for library in LIBRARIES)


@cache
def choose_library(dtype: torch.dtype, threads: int, *, deterministic: bool = False) -> ProductLibrary | None:
    """Return the fastest library with correct products for `threads` threads, the present number, or None.

    `deterministic`: return the first correct one, because libraries round differently, and the fastest one may vary
    from one measurement to the next.
    """
    right = [library for library in LIBRARIES if library.can(dtype) and _is_right(library, dtype, threads)]
    if not right or deterministic or len(right) == 1:
        return right[0] if right else None
    seconds = {library.name: _seconds(library, dtype) for library in right}
    log.info("a product takes %s", " and ".join(f"{name} {1e6 * taken:.0f} µs" for name, taken in seconds.items()))
    return min(right, key=lambda library: seconds[library.name])


_TRIED_SHAPES = ((96, 64), (48, 1536), (1030, 80))
"""Outputs and inputs."""
_TRIED_ROWS = (1, 4, 5, 31, 32, 64, 65, 255, 256, 257, 600)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Relative to the largest entry; several times the rounding error of sums of 1536 products."""
_TIMED_SHAPE, _TIMED_ROWS, _TIMES = (1536, 576), 64, 10


def _is_right(library: ProductLibrary, dtype: torch.dtype, threads: int) -> bool:
    """Return whether packed products equal plain ones."""
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in _TRIED_SHAPES:
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        packed, packed_gated = library.pack(weight), library.pack(weight, gated=True)
        for rows in _TRIED_ROWS:
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            expected = F.linear(x.float(), weight.float())
            for found, right in (
                (library.product(x, packed, weight), expected),
                (library.gated_product(x, packed_gated, weight), silu_and_multiply(expected)),
            ):
                worst = (found - right).abs().max().item()
                if not worst <= _TOLERANCE[dtype] * right.abs().max().item():
                    log.warning(
                        "%s packs no matrices here: with %d threads its product of %d rows, %d inputs and %d outputs "
                        "is off by %g",
                        *(library.name, threads, rows, inputs, outputs, worst),
                    )
                    return False
    return True


def _seconds(library: ProductLibrary, dtype: torch.dtype) -> float:
    """Return the time of one product in seconds, the least of several."""
    outputs, inputs = _TIMED_SHAPE
    weight, x = torch.ones(outputs, inputs, dtype=dtype), torch.ones(_TIMED_ROWS, inputs, dtype=dtype)
    packed = library.pack(weight)
    taken = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        library.product(x, packed, weight)
        taken.append(time.perf_counter() - began)
    return min(taken)
