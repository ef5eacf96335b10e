"""How fast the embedded engine's matrix products are, by who makes them.

    python benchmarks/bench_products.py [--quick]

The matrices are those of eight layers of SmolLM2-135M (28 million numbers), multiplied one after another as in a
forward pass, so that they come from memory and not from a cache. Billions of multiplications and additions per second,
the best of rounds in which all take turns: torch's plain product, and each library that `gserver/embedded/products.py`
knows, with packed weights. The engine takes the fastest of those that pass its trial.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from common import write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor

from streamrl.device import compute_with, keep_freed_memory
from streamrl.gserver.embedded.products import LIBRARIES, ProductLibrary

LAYERS = 8
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Outputs and inputs: queries, keys and values; what follows attention; gate and up; down."""
ROWS = (1, 8, 32, 64, 512)
DTYPES = (torch.float32, torch.bfloat16)
PLAIN = "plain"

Product = Callable[[Tensor, int, int], Tensor]
"""Rows, layer, and which of `SHAPES`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    keep_freed_memory()
    compute_with(arguments.threads)
    rows = []
    with torch.inference_mode():
        for dtype in DTYPES:
            ways = contenders(dtype)
            for count in ROWS:
                rates = compare(ways, dtype, count, rounds=1 if arguments.quick else 20)
                rows.append({"dtype": str(dtype).removeprefix("torch."), "rows": count, "gflops": rates})
    show(rows)
    settings = {"threads": arguments.threads, "layers": LAYERS, "quick": arguments.quick}
    print(f"written to {write_results('bench_products', settings, rows)}")


def contenders(dtype: torch.dtype) -> dict[str, Product]:
    """By name."""
    weights = [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(LAYERS)]
    ways: dict[str, Product] = {PLAIN: lambda x, layer, which: F.linear(x, weights[layer][which])}
    for library in LIBRARIES:
        if library.can(dtype):
            ways[library.name] = packed_product(library, weights)
    return ways


def packed_product(library: ProductLibrary, weights: Sequence[Sequence[Tensor]]) -> Product:
    packed = [[library.pack(weight) for weight in layer] for layer in weights]
    return lambda x, layer, which: library.product(x, packed[layer][which], weights[layer][which])


def compare(ways: dict[str, Product], dtype: torch.dtype, count: int, *, rounds: int) -> dict[str, float]:
    """The rate of each."""
    inputs = [torch.randn(count, shape[1]).to(dtype) for shape in SHAPES]
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds + 1):  # the first makes what is made once
        for name, product in ways.items():
            began = time.perf_counter()
            for layer in range(LAYERS):
                for which, x in enumerate(inputs):
                    product(x, layer, which)
            best[name] = min(best[name], time.perf_counter() - began)
    operations = 2 * count * LAYERS * sum(outputs * inputs for outputs, inputs in SHAPES)
    return {name: operations / seconds / 1e9 for name, seconds in best.items()}


def show(rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["gflops"]))
    table = Table(title="billions of multiplications and additions per second")
    table.add_column("dtype")
    for name in ("rows", *names):
        table.add_column(name, justify="right")
    for row in rows:
        rates = row["gflops"]
        table.add_row(row["dtype"], str(row["rows"]), *(f"{rates[n]:.0f}" if n in rates else "" for n in names))
    Console().print(table)


if __name__ == "__main__":
    main()
