"""Name the ratios that have fallen by more than a tenth since they were kept (`make bench`), or since a commit.

    python benchmarks/compare.py [bench_stream bench_engine …]
    python benchmarks/compare.py --before COMMIT [--rounds 3] [bench_stream …]

Runs the quick variants and compares with the results that are kept in `results/`. Rates depend on the machine and on
its other load; the compared ratios have no dimension, since both parts were measured in one run: speed-up against its
bound, share of a bare broadcast or of bare pyzmq, multiples of plain loops. Rows are the same points under the same
settings as the kept ones, only with fewer repeats, so a quick run has some of the kept rows and not all. A benchmark
with a row that fell is run once more, and the better of both counts: other load on the machine seldom hits the same row
twice. The exit code is 1 if a row has fallen.

With `--before`, COMMIT and the last commit are checked out into a temporary folder and run their own quick benchmarks
in turns, with the same interpreter and packages. It prints the ratio of the rates (`RATES`), last commit to COMMIT, of
each row: the median over the rounds, least and most. Above 1 is faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from common import KEPT, ROOT, Row, parser_of, processor, read_results, report
from rich.console import Console
from rich.table import Table

FALL = 0.1
"""Share of a ratio that may be lost before it counts."""
BUSY = 0.5
"""Load average at the start, above which other work is mentioned."""

Ratios = dict[str, float]
"""By the name of the row. Higher is better."""


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
    """Relative to `generate`, which is always there."""
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


def measure(benchmark: str, arguments: Sequence[str], *, tree: Path = ROOT) -> list[Row]:
    """Run a benchmark of the state of the code in `tree`; return its rows."""
    command = [sys.executable, str(tree / "benchmarks" / f"{benchmark}.py"), *arguments]
    print("$", *command, flush=True)
    environment = os.environ | {"PYTHONPATH": str(tree)}
    if subprocess.run(command, cwd=tree, env=environment, check=False).returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    rows: list[Row] = read_results(tree / "benchmarks" / "results" / "latest" / f"{benchmark}.json")["rows"]
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


def compare_with_kept(chosen: Sequence[str]) -> None:
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


# --- two states of the code ----------------------------------------------------------------------


class Rate(NamedTuple):
    """The rate of a row of a benchmark, and the columns that name the row."""

    of: Callable[[Row], float | None]
    """Higher is faster. None: the row has none."""
    names: Sequence[str]


RATES = {
    "bench_manager": Rate(
        lambda row: None if row["kind"] == "open" else row["admissions_per_second"], ("kind", "gservers", "in_flight")
    ),
    "bench_stream": Rate(lambda row: row["groups_per_second"], ("contender", "siblings", "tokens")),
    "bench_weights": Rate(lambda row: 1 / row["publish_seconds"], ("mode", "size", "gservers")),
    "bench_engine": Rate(lambda row: row["tokens_per_second"].get("streamrl"), ("model", "dtype", "concurrency")),
}
ONLY_OURS = [word for other in ("generate", "generate_batch", "sglang", "vllm") for word in ("--without", other)]


def rates_of(benchmark: str, tree: Path) -> dict[str, float]:
    """Run the quick benchmark of the state in `tree`; return its rates by row."""
    rate = RATES[benchmark]
    rows = measure(benchmark, ["--quick", *(ONLY_OURS if benchmark == "bench_engine" else [])], tree=tree)
    rates = {" ".join(str(row[name]) for name in rate.names): rate.of(row) for row in rows}
    return {row: found for row, found in rates.items() if found}


def compare_commits(commit: str, benchmarks: Sequence[str], *, rounds: int) -> None:
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before", Path(folder) / "after"
        for tree, state in ((before, commit), (after, "HEAD")):
            subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", tree, state], check=True)
        try:
            for round_ in range(rounds):
                for benchmark in benchmarks:
                    trees = (before, after) if round_ % 2 == 0 else (after, before)
                    rates = {tree: rates_of(benchmark, tree) for tree in trees}
                    for row in rates[before].keys() & rates[after].keys():
                        found[benchmark, row].append((rates[before][row], rates[after][row]))
        finally:
            for tree in (before, after):
                subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    rows: list[Row] = []
    for (benchmark, row), pairs in sorted(found.items()):
        ratios = [now / earlier for earlier, now in pairs]
        rows.append({"benchmark": benchmark, "row": row, "rates": pairs, "ratio": round(median(ratios), 3)})
        rows[-1] |= {"least": round(min(ratios), 3), "most": round(max(ratios), 3)}
    report("compare", {"before": commit, "rounds": rounds}, rows)


def main() -> None:
    names = [ratios.__name__ for ratios in COMPARED]
    parser = parser_of(__doc__)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--before", metavar="COMMIT", help=f"compare with this state of the code: {', '.join(RATES)}")
    parser.add_argument("--rounds", type=int, default=3, help="of --before")
    options = parser.parse_args()
    known = list(RATES) if options.before else names
    if unknown := set(options.benchmarks) - set(known):
        parser.error(f"not compared: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.before:
        compare_commits(options.before, options.benchmarks or known, rounds=options.rounds)
    else:
        compare_with_kept(options.benchmarks)


if __name__ == "__main__":
    main()
