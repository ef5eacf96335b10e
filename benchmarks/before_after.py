"""How fast the manager, the stream, weight updates and the embedded engine are, relative to an earlier commit.

    python benchmarks/before_after.py COMMIT [--rounds 3] [--benchmarks bench_manager bench_stream …]

Both states, that one and the last commit, are checked out into a temporary folder and run the quick form of their own
benchmark in turns, with the same interpreter and packages. Printed is the ratio of this state to that one for each row:
the median over the rounds, least and most. Above 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import ROOT, write_results
from rich.console import Console


class Compared(NamedTuple):
    """A benchmark of which two states are compared."""

    rate: Callable[[Mapping[str, Any]], float | None]
    """Of a row: the more, the faster. None: the row tells nothing."""
    names: Sequence[str]
    """Columns that name a row."""
    arguments: Sequence[str] = ()
    """Beside --quick."""


def _rate(column: str) -> Callable[[Mapping[str, Any]], float | None]:
    """A column that is a rate; rows whose rate was asked for tell nothing."""
    return lambda row: None if row.get("kind") in ("open", "one by one") else row.get(column)


COMPARED = {
    "bench_manager": Compared(_rate("admissions_per_second"), ("kind", "gservers", "in_flight")),
    "bench_stream": Compared(_rate("groups_per_second"), ("contender", "siblings", "tokens")),
    "bench_weights": Compared(lambda row: 1 / row["publish_seconds"], ("mode", "size", "gservers")),
    "bench_engine": Compared(
        lambda row: row["tokens_per_second"].get("streamrl"),
        ("model", "dtype", "concurrency"),
        [word for other in ("generate", "generate_batch", "sglang", "vllm") for word in ("--without", other)],
    ),
}


def measured(tree: Path, benchmark: str) -> dict[str, float]:
    """Run `benchmark` of the state in `tree`; return its rates by row."""
    compared = COMPARED[benchmark]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, str(tree / "benchmarks" / f"{benchmark}.py"), "--quick", *compared.arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    results = json.loads((tree / "benchmarks" / "results" / "latest" / f"{benchmark}.json").read_text())
    rates = {" ".join(str(row[name]) for name in compared.names): compared.rate(row) for row in results["rows"]}
    return {row: rate for row, rate in rates.items() if rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--benchmarks", nargs="+", choices=COMPARED, default=list(COMPARED))
    options = parser.parse_args()
    console = Console(width=140)
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before", Path(folder) / "after"
        for tree, commit in ((before, options.commit), (after, "HEAD")):
            subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", tree, commit], check=True)
        try:
            for round_ in range(options.rounds):
                for benchmark in options.benchmarks:
                    trees = (before, after) if round_ % 2 == 0 else (after, before)
                    rates = {tree: measured(tree, benchmark) for tree in trees}
                    for row in rates[before].keys() & rates[after].keys():
                        found[benchmark, row].append((rates[before][row], rates[after][row]))
        finally:
            for tree in (before, after):
                subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    rows: list[dict[str, Any]] = []
    for (benchmark, row), pairs in sorted(found.items()):
        ratios = [now / earlier for earlier, now in pairs]
        rows.append({"benchmark": benchmark, "row": row, "rates": pairs, "ratio": round(median(ratios), 3)})
        rows[-1] |= {"least": round(min(ratios), 3), "most": round(max(ratios), 3)}
        console.print(f"{benchmark} {row}: {rows[-1]['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    console.print(f"written to {write_results('before_after', {'before': options.commit}, rows)}")


if __name__ == "__main__":
    main()
