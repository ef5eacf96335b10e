"""The page on a long run: time to open it, memory, the wait for each view; and the cost of kept rollouts and of a
watcher for a run.

    python benchmarks/bench_page.py [--steps 10000] [--responses 1000000] [--rounds 3] [--quick]

The long run is made up (`tests/page/made_up.py`); its page is a process of its own, asked over HTTP as a browser does,
each view for the first time. `seconds` are from the request to the whole reply; `processor` is the page's time of a
core in between; `open` is from the start of the command to the end of the reply, interpreter included.

For the cost the same short run is made with and without: in turns, with no rollouts kept and no page, and with both as
they are by default and a client that asks for the overview every second. Compared is the processor time of all of the
run's processes for a step, without the page's, which gives way to them. The time of the thread that keeps the rollouts
is reported, too: it is more exact than the difference of two runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from common import EXAMPLES, ROOT, Row, cpu_seconds, parser_of, report

sys.path.insert(0, str(ROOT))

from streamrl.records.view import read_run
from tests.page.made_up import long_run

EXAMPLE = EXAMPLES / "copy_scratch.toml"
FIRST_STEPS = 10
"""First steps of a run, which are left out of its cost: they do work that is done once."""

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
    "rollouts filtered": "api/runs/0/rollouts?filter=reward%3E0.5%20step%3E500",
    "a group": "api/runs/0/rollouts/500/500",
    "search": "api/runs/0/rollouts/search?text=answer%20is%2017",
}


def measured(folder: Path) -> list[Row]:
    """One row for each view of the run in `folder`."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "streamrl", "page", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    process = psutil.Process(page.pid)
    rows: list[Row] = []
    try:
        assert page.stdout is not None
        url = page.stdout.readline().strip()
        for name, path in VIEWS.items():
            used, asked = cpu_seconds(page.pid), time.perf_counter()
            with urllib.request.urlopen(url + path, timeout=120) as answer:
                size = len(answer.read())
            now = time.perf_counter()
            rows.append(
                {
                    "view": name,
                    "seconds": now - asked,
                    "processor": cpu_seconds(page.pid) - used,
                    "kilobytes": size / 1000,
                    "memory_mb": process.memory_info().rss / 1e6,
                    "open": now - began,
                }
            )
    finally:
        page.terminate()
        page.wait(30)
    return rows


def cost(folder: Path, *, kept: bool, steps: int) -> Row:
    """Make one run in `folder`; return its milliseconds a step."""
    words = [f"run.dir={folder.parent}", f"run.name={folder.name}", f"run.total_train_steps={steps}"]
    words += ["run.stop_at_reward=1e9", "trainer.save_at_end=false", "metrics.plots=false", "metrics.sinks=[]"]
    words += ["--page"] if kept else ["metrics.rollouts_per_step=0"]
    command = [sys.executable, "-m", "streamrl", "run", str(EXAMPLE), *words]
    watcher = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        said = []
        for line in running.stdout:
            said.append(line)
            if watcher is None and (found := re.search(r"http://\S+/", line)) and "browser" in line:
                watcher = threading.Thread(target=watch, args=(found[0],), daemon=True)
                watcher.start()
    if running.returncode or kept != (watcher is not None):
        sys.exit(f"{' '.join(command)} failed:\n{''.join(said)[-3000:]}")
    run = read_run(folder)
    times = run.columns()["time"] + run.begin
    begin, end, count = times[FIRST_STEPS - 1], times[-1], len(times) - FIRST_STEPS

    def used(process: str, counter: str) -> float:
        beats = run.processes[process]
        before, after = np.interp([begin, end], beats.times, beats.grown(counter))
        return float(after - before)

    keeping = sum(used(name, "rollouts_processor_seconds_total") for name in run.processes if "model_worker" in name)
    return {
        "kept": kept,
        "steps": count,
        "step_ms": 1000 * (end - begin) / count,
        "processor_ms": 1000 * sum(used(name, "processor_seconds_total") for name in run.processes) / count,
        "keeping_ms": 1000 * keeping / count,
    }


def watch(url: str) -> None:
    """Request the views of an open overview, until the page is gone."""
    with contextlib.suppress(OSError):
        while True:
            for path in ("api/runs", VIEWS["overview"], VIEWS["health"], VIEWS["rollouts"]):
                with urllib.request.urlopen(url + path, timeout=60) as answer:
                    answer.read()
            time.sleep(1)


def main() -> None:
    parser = parser_of(__doc__, quick="one round of fewer steps")
    parser.add_argument("--steps", type=int, default=10_000, help="of the long run, at least 500")
    parser.add_argument("--responses", type=int, default=1_000_000, help="of the long run")
    parser.add_argument("--rounds", type=int, default=3, help="short runs with, and as many without")
    asked = parser.parse_args()
    rounds, short = (1, 40) if asked.quick else (asked.rounds, 120)
    with tempfile.TemporaryDirectory() as folder:
        run = long_run(Path(folder) / "made-up", steps=asked.steps, responses=asked.responses)
        views = measured(run)
        costs = [
            cost(Path(folder) / f"run-{number}-{kept}", kept=kept, steps=short)
            for number in range(rounds)
            for kept in (False, True)
        ]
    without, with_ = ([row for row in costs if row["kept"] is kept] for kept in (False, True))
    ratio = median(row["processor_ms"] for row in with_) / median(row["processor_ms"] for row in without)
    share = median(row["keeping_ms"] / row["processor_ms"] for row in with_)
    settings = {
        "quick": asked.quick,
        "steps": asked.steps,
        "responses": asked.responses,
        "made_up": True,
        "example": EXAMPLE.name,
    }
    settings |= {"processor_ratio": ratio, "keeping_share": share}
    report("bench_page", settings, [*views, *costs])


if __name__ == "__main__":
    main()
