"""What each part of streamrl's C gains in the embedded engine: with all of it, without one part, without any.

    python benchmarks/bench_native.py [--quick] [--threads N] [--case NAME] [--dtype float32|bfloat16]

The same engine, once with all its C and once for each part with torch in its place (`engine_contenders.leave_out`),
each in a process of its own; they take turns, so that what else the machine does meets all of them. The figure is
processor time for each token, prompts included, as a multiple of that with all C: a part is kept where leaving it out
costs 1.2 times as much or more at some point. Needs a processor with AVX-512: elsewhere torch computes anyway.
docs/native.md has the figures.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
from bench_engine import CASES, CONTEXT, PROMPT_TOKENS, WARM_UP_TOKENS, measure
from common import write_results
from engine_contenders import NATIVE_PARTS, Served
from rich.console import Console
from rich.table import Table

from streamrl.config import from_dict
from streamrl.models import ensure_checkpoint

VARIANTS = ("", *NATIVE_PARTS, "all")
CONCURRENCIES = (1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds in place of five, and concurrency 8 only")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="may be given twice")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="may be repeated")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else 5
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if arguments.case and case.name not in arguments.case:
            continue
        for dtype in arguments.dtype or ["float32", "bfloat16"]:
            config = from_dict(
                {
                    "model": case.model,
                    "gserver": {
                        "threads": arguments.threads,
                        "dtype": dtype,
                        "max_context": CONTEXT,
                        "prefix_cache_mb": 0,
                    },
                    "data": {"max_prompt_tokens": PROMPT_TOKENS},
                }
            )
            folder = ensure_checkpoint(config)
            vocabulary = msgspec.json.decode((folder / "config.json").read_bytes())["vocab_size"]
            with ExitStack() as stack:
                served = {}
                for variant in VARIANTS:
                    served[variant] = Served(variant or "all C", config, folder, without=variant)
                    stack.callback(served[variant].close)
                for concurrency in CONCURRENCIES[1:2] if arguments.quick else CONCURRENCIES:
                    costs: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
                    generator = np.random.default_rng(concurrency)
                    for round_ in range(rounds + 1):  # the first one warms up
                        prompts = generator.integers(0, vocabulary, (concurrency, PROMPT_TOKENS)).tolist()
                        for variant, contender in served.items():
                            _, cost = measure(contender, prompts, case.new_tokens if round_ else WARM_UP_TOKENS)
                            costs[variant] += [cost] if round_ else []
                    best = {variant: min(found) for variant, found in costs.items()}
                    row: dict[str, Any] = {"model": case.name, "dtype": dtype, "concurrency": concurrency}
                    row["cpu_ms_per_token"] = round(best[""], 4)
                    for variant in VARIANTS[1:]:
                        row[f"without_{variant}"] = round(best[variant] / best[""], 2)
                        ratios = [a / b for a, b in zip(costs[variant], costs[""], strict=True)]
                        row[f"without_{variant}_median"] = round(statistics.median(ratios), 2)
                    rows.append(row)
                    print(row, flush=True)
    table = Table(title="Processor time for a token as a multiple of that with all C (best rounds)")
    columns = ["model", "dtype", "concurrency", *(f"without_{variant}" for variant in VARIANTS[1:])]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console = Console()
    console.print(table)
    settings = {"prompt_tokens": PROMPT_TOKENS, "threads": arguments.threads, "rounds": rounds}
    console.print(f"written to {write_results('bench_native', settings, rows)}")


if __name__ == "__main__":
    main()
