"""Whole runs as a user starts them: `streamrl run` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
COPY_SCRATCH = ROOT / "examples" / "copy_scratch.toml"


def overrides(folder: Path, name: str, **settings: Any) -> list[str]:
    """Command-line overrides for a run in `folder`; `a__b` stands for `a.b`."""
    base = {"run__dir": folder, "run__name": name, "metrics__plots": "false", "metrics__tensorboard": "false"}
    return [f"{key.replace('__', '.')}={value}" for key, value in (base | settings).items()]


def start(config: Path, arguments: list[str], **options: Any) -> subprocess.Popen[str]:
    """`streamrl run` with its output in pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "streamrl", "run", str(config), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,
    )


def run(config: Path, arguments: list[str], *, timeout: float = 400.0) -> str:
    """A whole run that has to succeed; answers what it printed."""
    process = start(config, arguments)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=30)
        raise AssertionError(f"the run took more than {timeout:.0f} s; it said:\n{output[-4000:]}") from None
    assert process.returncode == 0, output[-6000:]
    return output


def summary(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trained_seqs(run_dir: Path) -> list[int]:
    """Every sequence number that was trained on, in order of training."""
    return [seq for step in steps(run_dir) for seq in step["seqs"]]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Living processes that were started for the run."""
    marker = str(run_dir)
    found = []
    for process in psutil.process_iter():
        try:
            if any(marker in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def largest_difference(run_dir: Path) -> float:
    """Between the log-probabilities of gservers and trainer, over all versions. A gserver may be left out of one that
    is followed by the next within milliseconds, which a busy machine does to a small model now and then."""
    made = [step["metrics"] for step in steps(run_dir)]
    found = [metrics["logprob_diff_max"] for metrics in made if "logprob_diff_max" in metrics]
    assert len(found) >= 0.75 * len(made) - 1, f"compared at {len(found)} of {len(made)} versions"
    return max(found)


def assert_exactly_once(run_dir: Path) -> None:
    """No group was trained on twice, none was lost, no token was too old."""
    seqs = trained_seqs(run_dir)
    assert len(seqs) == len(set(seqs))
    figures = summary(run_dir)
    assert figures["groups_trained"] == len(seqs)
    assert figures["groups_lost"] == 0
    assert figures["oldest_token_age"] <= figures["max_staleness"]
    for step in steps(run_dir):
        assert all(int(age) <= figures["max_staleness"] for age in step["token_ages"])
