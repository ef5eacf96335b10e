"""Shared by all benchmarks: command line, processor time and memory, results and how they are shown.

A benchmark writes its results to `results/latest/`, which git ignores. Results that README and docs show are in
`results/`, and only `figures.py` writes there, so a trial run replaces no kept figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from streamrl.processor import avoid_broken_instructions

avoid_broken_instructions()  # before anything computes in a benchmark or in what it starts

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "benchmarks" / "results"
LATEST = KEPT / "latest"
WRITTEN_BY_FIGURES = ("README.md", "docs", "benchmarks/results")
"""Files that `figures.py` changes: they do not make a checkout another state of the code."""
RUN_SECONDS = 1800.0
"""Deadline of a run."""
WIDTH = 180
"""Columns of a table on the console."""

Row = dict[str, Any]


def parser_of(documentation: str | None, *, quick: str = "") -> argparse.ArgumentParser:
    """The command line of a benchmark. `quick`: the help of its option --quick, if it has one."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


# --- runs ----------------------------------------------------------------------------------------

EXAMPLES = ROOT / "examples"
NO_FILES = {"trainer.save_at_end": "false", "metrics.plots": "false", "metrics.sinks": "[]"}
"""Settings of a run that leaves only its metrics."""


def words_of(settings: Mapping[str, object]) -> list[str]:
    """Settings by section and key, as words of a command line."""
    return [f"{key}={value}" for key, value in settings.items()]


def run_example(
    example: Path, settings: Mapping[str, object], *, started: Callable[[int], object] = lambda pid: None
) -> str:
    """Run `example` as a user would, with other `settings`; return its standard output. `started` gets the process's
    id. Exit if the run fails."""
    command = [sys.executable, "-m", "streamrl", "run", str(example), *words_of(settings)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as running:
        started(running.pid)
        output, errors = running.communicate(timeout=RUN_SECONDS)
    if running.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{output[-3000:]}\n{errors[-3000:]}")
    return output


# --- processor time and memory -------------------------------------------------------------------


def cpu_seconds(pid: int, *, children: bool = False) -> float:
    """Processor seconds that process `pid`, with `children` and all that it started, has used so far."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *(process.children(recursive=True) if children else ()))]
    return float(sum(each.user + each.system for each in times))


def resident(field: str) -> int:
    """Bytes of this process's memory: `VmRSS` now, `VmHWM` at most since `begin_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def begin_peak() -> None:
    """Begin the peak of this process's memory (`VmHWM`) at its present size."""
    Path("/proc/self/clear_refs").write_text("5")


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# --- results -------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Processor, memory, devices, load of the last minute and library versions."""
    import torch

    return {
        "processor": processor(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load_average": round(os.getloadavg()[0], 1),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> dict[str, Any]:
    """The state of the code: `id`, `date` (of the change, which a rebase keeps), and whether it was `changed` since.

    Outside a checkout `id` and `date` are None.
    """
    described = _git("log", "-1", "--format=%h %aI")
    if described is None:
        return {"id": None, "date": None, "changed": False}
    name, date = described.split()
    others = [f":(exclude){path}" for path in WRITTEN_BY_FIGURES]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    return {"id": name, "date": date, "changed": bool(changed)}


def write_results(
    name: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    measured_at: Mapping[str, Any] | None = None,
    row_per_line: bool = False,
) -> Path:
    """Write `results/latest/<name>.json` as `{commit, machine, time, settings, rows}`; return its path.

    `measured_at`: in place of `commit()`, where rows were measured earlier. `row_per_line`: for rows with long lists.
    The file is replaced as a whole.
    """
    path = latest(f"{name}.json")
    content = {
        "commit": dict(measured_at or commit()),
        "machine": machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": dict(settings),
    }
    if row_per_line:
        lines = ",\n  ".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows)
        text = json.dumps(content, indent=1).removesuffix("\n}") + f',\n "rows": [\n  {lines}\n ]\n}}'
    else:
        text = json.dumps(content | {"rows": [dict(row) for row in rows]}, indent=1)
    written = path.with_suffix(".writing")
    written.write_text(text + "\n")
    written.replace(path)
    return path


def report(name: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], **how: Any) -> None:
    """Write results as `write_results` does, and print their tables."""
    path = write_results(name, settings, rows, **how)
    show(name, read_results(path))
    print(f"written to {path}")


def show(name: str, results: dict[str, Any]) -> None:
    """Print the tables that README and docs have of the benchmark `name`; of another benchmark, all columns."""
    from rich.console import Console
    from rich.markdown import Markdown
    from tables import TABLES, all_columns

    for render in [table.render for table in TABLES if table.benchmark == name] or [all_columns]:
        Console(width=WIDTH).print(Markdown(render(results)))


def latest(file: str) -> Path:
    """The path to which a benchmark writes `file`: its results, or their plot."""
    LATEST.mkdir(parents=True, exist_ok=True)
    return LATEST / file


def read_results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def earlier_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of the latest run, for a benchmark that adds others. Exit if they are of another state of the
    code or another processor: figures in one table can be compared."""
    path = latest(f"{name}.json")
    if not path.exists():
        return []
    found = read_results(path)
    for what, theirs, ours in (
        ("commit", found["commit"], commit()),
        ("processor", found["machine"]["processor"], processor()),
    ):
        if theirs != ours:
            raise SystemExit(f"--append: the rows in {path} are of another {what}: {theirs}, here {ours}")
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    """Return the output of git in this checkout; None without git or without a checkout."""
    try:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
