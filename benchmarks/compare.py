"""Say which ratio has fallen by more than a tenth since it was kept: `make bench`.

    python benchmarks/compare.py [bench_stream bench_engine ...]

Runs the quick variants and compares with the results that are kept in `results/`. Rates depend on the machine and on
what else it does; what is compared has no dimension, since both parts of it were measured in one run: speed-up
against its bound, share of a bare broadcast or of bare pyzmq, multiples of plain loops. Rows are the same points under
the same settings as the kept ones, only with fewer repeats, so a quick run has some rows of the kept ones and not all.
A benchmark with a row that fell is run once more, and the better of both counts: other load on the machine seldom hits
the same row twice. The exit code is 1 if a row has fallen.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from common import KEPT, LATEST, ROOT, processor, read_results
from rich.console import Console
from rich.table import Table

FALL = 0.1
"""Share of a ratio that may be lost before it counts."""
BUSY = 0.5
"""Load average at the start, above which other work is mentioned."""

Row = dict[str, Any]
Ratios = dict[str, float]
"""By what a reader calls the row. Higher is better."""


# --- ratios of each benchmark's rows -------------------------------------------------------------


def throughput(rows: list[Row]) -> Iterator[tuple[str, float]]:
    """Speed-up over the synchronous run, as a share of what an ideal pipeline has; of the synchronous run as well."""
    for row in rows:
        generation = "SIMULATED generation" if row["simulated_generation"] else "embedded engine"
        name = f"{generation}, max_staleness {row['max_staleness']}, {row['over_age']}: share of the bound"
        yield name, row["speedup"] / row["bound"]


def bench_stream(rows: list[Row]) -> Iterator[tuple[str, float]]:
    for row in rows:
        if row["contender"] == "streamrl":
            yield f"{row['siblings']} × {row['tokens']} tokens: share of bare pyzmq", row["ratio_to_bare"]


def bench_rewards(rows: list[Row]) -> Iterator[tuple[str, float]]:
    for row in rows:
        if row["way"] == "together":
            yield f"{row['reward']}: gain over calls one at a time", row["gain"]


def bench_engine(rows: list[Row]) -> Iterator[tuple[str, float]]:
    """Beside `generate`, which is always there."""
    for row in rows:
        rates = row["tokens_per_second"]
        if "streamrl" in rates and "generate" in rates:
            name = f"{row['model']}, {row['dtype']}, {row['concurrency']} at once: multiple of generate"
            yield name, rates["streamrl"] / rates["generate"]


def bench_trainer(rows: list[Row]) -> Iterator[tuple[str, float]]:
    for row in rows:
        if row["contender"].startswith("streamrl"):
            yield f"{row['model']}, {row['contender']}: multiple of padding, CPU time", row["ratio_by_cpu_time"]


def bench_weights(rows: list[Row]) -> Iterator[tuple[str, float]]:
    for row in rows:
        name = f"{row['mode']}, {row['engine']}, {row['size']} {row['dtype']}, {row['gservers']} gservers"
        yield f"{name}: share of a bare broadcast", row["share"]


def bench_routing(rows: list[Row]) -> Iterator[tuple[str, float]]:
    base = {(row["case"], row["groups"]): row["tokens_per_second"] for row in rows if row["policy"] == "round robin"}
    for row in rows:
        if row["policy"] == "manager":
            name = f"{row['case']}, {row['groups']} groups: multiple of round robin"
            yield name, row["tokens_per_second"] / base[row["case"], row["groups"]]


COMPARED = {
    bench_stream: ["--quick"],
    bench_rewards: ["--quick"],
    bench_engine: ["--quick"],
    bench_trainer: ["--quick"],
    bench_weights: ["--quick", "--sizes", "135M", "--modes", "collective", "shared_memory"],
    bench_routing: [],
    throughput: ["--quick"],
}
"""Ratios of a benchmark, which has the function's name, and its arguments."""


# --- comparison ----------------------------------------------------------------------------------


class Change(NamedTuple):
    """A row that is kept and was measured now."""

    name: str
    kept: float
    now: float

    @property
    def share(self) -> float:
        """Share of the kept ratio that was won; negative: lost."""
        return self.now / self.kept - 1

    @property
    def fell(self) -> bool:
        return self.share < -FALL


class Comparison(NamedTuple):
    changes: list[Change]
    """In the order of the kept rows."""
    new: list[str]
    """Measured now, and not kept."""
    unmeasured: list[str]
    """Kept, and not measured now."""

    @property
    def fallen(self) -> list[Change]:
        return [change for change in self.changes if change.fell]


def compare(kept: Mapping[str, float], now: Mapping[str, float]) -> Comparison:
    return Comparison(
        changes=[Change(name, kept[name], now[name]) for name in kept if name in now],
        new=[name for name in now if name not in kept],
        unmeasured=[name for name in kept if name not in now],
    )


def better(one: Mapping[str, float], other: Mapping[str, float]) -> Ratios:
    """Return the higher ratio of each row that is in either."""
    return {name: max(found[name] for found in (one, other) if name in found) for name in {**one, **other}}


def measure(benchmark: str, arguments: list[str]) -> list[Row]:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{benchmark}.py"), *arguments]
    print("$", *command, flush=True)
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    rows: list[Row] = read_results(LATEST / f"{benchmark}.json")["rows"]
    return rows


def table_of(found: Mapping[str, Comparison]) -> Table:
    table = Table("benchmark", "row", title="ratios that are kept, and now")
    for column in ("kept", "now", "change"):
        table.add_column(column, justify="right")
    for benchmark, comparison in found.items():
        for change in comparison.changes:
            figures = f"{change.kept:.2f}", f"{change.now:.2f}", f"{change.share:+.0%}"
            table.add_row(benchmark, change.name, *figures, style="bold red" if change.fell else None)
        for name in comparison.new:
            table.add_row(benchmark, name, "–", "", "new", style="dim")
    return table


def main() -> None:
    names = [ratios.__name__ for ratios in COMPARED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"of {', '.join(names)}; by default all")
    chosen = parser.parse_args().benchmarks
    if unknown := set(chosen) - set(names):
        parser.error(f"not compared: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    console = Console(width=140)
    found: dict[str, Comparison] = {}
    notes = []
    if (load := os.getloadavg()[0]) > BUSY:
        notes.append(f"The machine did other work (load {load:.1f}): what uses several threads may look slow for that.")
    for ratios, arguments in COMPARED.items():
        name = ratios.__name__
        if chosen and name not in chosen:
            continue
        results = read_results(KEPT / f"{name}.json")
        kept, now = dict(ratios(results["rows"])), dict(ratios(measure(name, arguments)))
        if compare(kept, now).fallen:
            now = better(now, dict(ratios(measure(name, arguments))))
        found[name] = compare(kept, now)
        if (theirs := results["machine"]["processor"]) != processor():
            notes.append(f"{name} is kept from {theirs}; this is {processor()}: ratios differ by that, too.")
    console.print(table_of(found), *notes, sep="\n")
    if incomparable := [name for name, comparison in found.items() if not comparison.changes]:
        raise SystemExit(f"no row was measured that is kept: {', '.join(incomparable)}")
    if fallen := [f"{name}: {change.name}" for name, c in found.items() for change in c.fallen]:
        raise SystemExit("\n".join([f"fell by more than {FALL:.0%}:", *fallen]))


if __name__ == "__main__":
    main()
