"""How long the page takes to open a long run, what memory it takes, and what each view waits for.

    python benchmarks/bench_page.py [--steps 10000] [--responses 1000000]

The run is made up (`tests/page/made_up.py`); its page is a process of its own, asked over HTTP as a browser does, each
view for the first time. `seconds` are from the question to the whole answer; `processor` is what the page computed
meanwhile; `open` is from the start of the command to the end of the answer, interpreter included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from common import write_results
from rich.console import Console
from rich.table import Table

from tests.page.made_up import long_run

NAMES = (
    "reward_mean,response_length_mean,generated_per_second,tokens_per_second,trainer_wait,generation_idle,"
    "effective_sample_size,grad_norm,entropy,logprob_diff_mean,publish_seconds,step_seconds,loss,masked_share,age"
)
VIEWS = {
    "runs": "api/runs",
    "overview": f"api/runs/0/steps?names={NAMES}",
    "overview again": f"api/runs/0/steps?names={NAMES}",
    "health": "api/runs/0/health",
    "timeline, whole run": "api/runs/0/timeline?columns=800",
    "timeline, a minute": "api/runs/0/timeline?begin=6000&end=6060&columns=800",
    "fleet": "api/runs/0/fleet",
    "rollouts": "api/runs/0/rollouts",
    "rollouts sorted by reward": "api/runs/0/rollouts?sort=reward",
    "rollouts filtered": "api/runs/0/rollouts?filter=reward%3E0.5%20step%3E5000",
    "a group": "api/runs/0/rollouts/5000/5000",
    "search": "api/runs/0/rollouts/search?text=answer%20is%2017",
}


def measured(folder: Path) -> list[dict[str, Any]]:
    """One row for each view of the run in `folder`."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "streamrl", "page", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    process = psutil.Process(page.pid)
    rows: list[dict[str, Any]] = []
    try:
        assert page.stdout is not None
        url = page.stdout.readline().strip()
        for name, path in VIEWS.items():
            used, asked = process.cpu_times(), time.perf_counter()
            with urllib.request.urlopen(url + path, timeout=120) as answer:
                size = len(answer.read())
            now, after = time.perf_counter(), process.cpu_times()
            rows.append(
                {
                    "view": name,
                    "seconds": now - asked,
                    "processor": after.user + after.system - used.user - used.system,
                    "kilobytes": size / 1000,
                    "memory_mb": process.memory_info().rss / 1e6,
                    "open": now - began,
                }
            )
    finally:
        page.terminate()
        page.wait(30)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--responses", type=int, default=1_000_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = long_run(Path(folder) / "made-up", steps=asked.steps, responses=asked.responses)
        rows = measured(run)
    table = Table(title=f"{asked.steps:,} steps, {asked.responses:,} responses (made up)")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "view" else "right")
    for row in rows:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    write_results(Path(__file__).stem, {"steps": asked.steps, "responses": asked.responses, "made_up": True}, rows)


if __name__ == "__main__":
    main()
