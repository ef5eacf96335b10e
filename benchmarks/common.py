"""What every benchmark shares: what a figure depends on, and one place and form for results.

A benchmark writes to `results/latest/`, which git ignores, whatever it measured. What README and docs show is kept in
`results/`, and only `figures.py` writes there: so no trial run replaces a kept figure.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.processor import avoid_broken_instructions

avoid_broken_instructions()  # before anything computes in a benchmark or in what it starts

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "benchmarks" / "results"
LATEST = KEPT / "latest"
WRITTEN_BY_FIGURES = ("README.md", "docs", "benchmarks/results")
"""What measuring changes itself: it does not make a checkout another state of the code."""


def machine() -> dict[str, Any]:
    """Processor, memory, devices, load of the last minute and library versions."""
    import psutil
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


def latest(file: str) -> Path:
    """Where a benchmark writes `file`: its results, or their plot."""
    LATEST.mkdir(parents=True, exist_ok=True)
    return LATEST / file


def read_results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def earlier_rows(name: str) -> list[dict[str, Any]]:
    """The rows of the latest run, to add others to them. Exit if they are of another state of the code or processor:
    figures in one table can be compared."""
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
    """What git says about this checkout; None where there is neither git nor a checkout."""
    try:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
