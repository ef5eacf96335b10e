"""The gain of asynchrony: the same job synchronously and at several values of `max_staleness`.

    python benchmarks/throughput.py [--quick] [--seeds N]

(a) for real: the embedded engine and a model trained from scratch (examples/copy_scratch.toml);
(b) SIMULATED generation: a gserver with simulated token times and long-tailed lengths
    (no model behind it, so its rewards mean nothing); everything else of the run is real.

Rates are taken between the first and the last step of the steady part of a run (the first fifth
is left out). `bound` is the smaller of two speed-ups. `pipeline` is the one of an ideal pipeline on the same
slots: the synchronous time of a step divided by the larger of a batch's training time and its
slot-seconds of generation divided by the slots. With the embedded engine slot-seconds depend on how
many requests are decoded together, so it is an estimate; with simulated generation it is exact up to
noise. `cores` is the one of cores that are never idle, at the processor time that a group costs in the
row's own run: its speed-up divided by `cores_busy`, the share of the cores that are busy in the steady
part. Two busy threads of one core slow each other down, so a group costs more than in a synchronous run.

Of runs with several seeds rates are medians, ages the largest, and masked and dropped shares means;
the final reward is their mean, and the least and the most of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import psutil
from common import EXAMPLES, NO_FILES, Row, cpu_seconds, latest, parser_of, report, run_example

from streamrl.config import load

EXAMPLE = EXAMPLES / "copy_scratch.toml"
SIMULATED = {
    "gserver.engine": "simulated",
    "gserver.simulation.token_seconds": 0.005,
    "gserver.simulation.mean_length": 64,
    "gserver.simulation.sigma": 1.0,
    "gserver.simulation.vocab_size": 12,
    "gserver.max_running": 64,
    "gserver.max_context": 512,
    "model.scratch.max_position_embeddings": 512,
    "rollout.reward.function": "streamrl.rollout.tasks:hash_reward",
    "rollout.sampling.max_new_tokens": 400,
    "trainer.batch_groups": 8,
    "rollout.group_size": 8,
}
STEPS = {"embedded": 80, "simulated": 40}
SEEDS = {"embedded": 3, "simulated": 1}
"""Runs of each kind. Simulated ones differ only in what they draw, and have no rewards that mean anything."""
SAMPLE_SECONDS = 0.25


def main() -> None:
    parser = parser_of(__doc__, quick="fewer steps and values, one seed: three minutes")
    parser.add_argument("--engine", choices=["embedded", "simulated", "both"], default="both")
    parser.add_argument("--staleness", type=int, nargs="+", help="values of max_staleness besides 0")
    parser.add_argument(
        "--over-age",
        nargs="+",
        choices=["mask", "wait", "drop"],
        help="by default: mask at every value, wait and drop at 4",
    )
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--seeds", type=int, help=f"runs of each kind, by default {SEEDS}")
    options = parser.parse_args()
    values = options.staleness or ([4] if options.quick else [1, 2, 4, 8])
    policies = options.over_age or ["mask"]
    engines = ["embedded", "simulated"] if options.engine == "both" else [options.engine]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for engine in engines:
            seeds = options.seeds or (1 if options.quick else SEEDS[engine])
            jobs = [(0, "mask")] + [(value, policy) for value in values for policy in policies]
            if not (options.quick or options.over_age or options.staleness):
                jobs += [(4, "wait"), (4, "drop")]
            runs: dict[tuple[int, str], list[dict[str, float]]] = {job: [] for job in jobs}
            for seed in range(seeds):  # all kinds take turns: other load on the machine hits them alike
                for value, policy in jobs:
                    # Quick synchronous runs, the slow ones, are cut short; how near the others come to the bound is
                    # then the same figure as in a full run.
                    steps = options.steps or STEPS[engine] // (2 if options.quick and value == 0 else 1)
                    print(f"{label(engine)}: η {value}, over_age {policy}, seed {seed}, {steps} steps …", flush=True)
                    runs[value, policy].append(run(Path(folder), engine, value, policy, steps, seed=seed))
            figures = {job: aggregate(found) for job, found in runs.items()}
            rows += [as_row(engine, *job, figures[job], synchronous=figures[0, "mask"]) for job in jobs]
    plot(rows, latest("throughput.png"))
    settings = {"quick": options.quick, "example": EXAMPLE.name, "simulated": SIMULATED}
    report("throughput", settings, rows)


def label(engine: str) -> str:
    """The name of an engine in tables and plots."""
    return "SIMULATED generation" if engine == "simulated" else "embedded engine"


def run(
    folder: Path,
    engine: str,
    max_staleness: int,
    over_age: str,
    steps: int,
    *,
    seed: int,
    example: Path = EXAMPLE,
) -> dict[str, float]:
    """One run as a user would start it; return its figures. `example`: its configuration."""
    overrides: dict[str, Any] = {
        "run.dir": str(folder),
        "run.name": f"{engine}-{max_staleness}-{over_age}-{seed}",
        "run.seed": seed,
        "run.total_train_steps": steps,
        "staleness.max_staleness": max_staleness,
        "staleness.over_age": over_age,
        "staleness.most_drift": 0.0,  # the pools at this staleness, however the policy moves
        **NO_FILES,
    }
    if engine == "simulated":
        overrides |= SIMULATED
    meter = ProcessorMeter()
    run_example(example, overrides, started=meter.start)
    return figures_of(folder / str(overrides["run.name"]), meter)


class ProcessorMeter:
    """Processor seconds of a process and all that it starts, sampled in a thread until it has ended."""

    def __init__(self) -> None:
        self._of_each: dict[int, float] = {}
        self._times: list[float] = []
        self._seconds: list[float] = []

    def start(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        threading.Thread(target=self._sample, daemon=True).start()

    def between(self, begin: float, end: float) -> float:
        """Used from `begin` to `end`, in seconds of the wall clock."""
        before, after = np.interp([begin, end], self._times, self._seconds)
        return float(after - before)

    def _sample(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                for process in [self._root, *self._root.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self._of_each[process.pid] = cpu_seconds(process.pid)
                self._times.append(time.time())
                self._seconds.append(sum(self._of_each.values()))
                time.sleep(SAMPLE_SECONDS)


def figures_of(run_dir: Path, meter: ProcessorMeter) -> dict[str, float]:
    """Rates of the steady part of a run, and its summary."""
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    first = len(steps) // 5
    steady = steps[first + 1 :]
    begin, end = steps[first]["time"], steady[-1]["time"]
    seconds = end - begin
    metrics = [step["metrics"] for step in steady]
    processor = meter.between(begin, end)
    status = json.loads((run_dir / "final.json").read_text())["status"]
    slot_seconds = sum(p["stats"].get("slot_seconds_total", 0.0) for p in status["processes"] if p["role"] == "gserver")
    settings = load(run_dir / "config.toml").gserver
    trained, dropped = summary["groups_trained"], status["ledger"]["dropped"]
    return {
        "steps": len(steps),
        "step_seconds": seconds / len(steady),
        "tokens_per_second": sum(m["tokens_trained"] for m in metrics) / seconds,
        "groups_per_second": sum(m["groups"] for m in metrics) / seconds,
        "train_seconds": fmean(m["train_seconds"] for m in metrics),
        "generation_seconds_per_group": slot_seconds / (settings.max_running * settings.count) / (trained + dropped),
        "cores_busy": processor / seconds / len(os.sched_getaffinity(0)),
        "processor_seconds_per_group": processor / sum(m["groups"] for m in metrics),
        "groups_per_batch": fmean(m["groups"] for m in metrics),
        "mean_token_age": summary["mean_token_age"],
        "oldest_token_age": summary["oldest_token_age"],
        "masked_share": summary["masked_share"],
        "dropped_share": dropped / max(1, trained + dropped),
        "reward_final": summary["reward_final"],
    }


def aggregate(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The figures of runs that differ in nothing but the seed; `reward_final` as mean, least, most, and of each."""
    rewards = [figures["reward_final"] for figures in runs]
    found: dict[str, Any] = {key: median(figures[key] for figures in runs) for key in runs[0]}
    return found | {
        "seeds": len(runs),
        "oldest_token_age": max(figures["oldest_token_age"] for figures in runs),
        "masked_share": fmean(figures["masked_share"] for figures in runs),
        "dropped_share": fmean(figures["dropped_share"] for figures in runs),
        "reward_final": {"mean": fmean(rewards), "least": min(rewards), "most": max(rewards), "of_each": rewards},
    }


def as_row(
    engine: str, value: int, policy: str, figures: dict[str, Any], *, synchronous: dict[str, Any]
) -> dict[str, Any]:
    """A line of the table: the figures of `aggregate`, relative to the synchronous run."""
    generation = synchronous["generation_seconds_per_group"] * synchronous["groups_per_batch"]
    speedup = figures["groups_per_second"] / synchronous["groups_per_second"]
    bounds = {
        "pipeline": synchronous["step_seconds"] / max(synchronous["train_seconds"], generation),
        "cores": speedup / figures["cores_busy"],
    }
    return {
        "engine": engine,
        "simulated_generation": engine == "simulated",
        "mode": "async" if value else "sync",
        "max_staleness": value,
        "over_age": policy,
        **figures,
        "speedup": speedup,
        "bound": min(bounds.values()),
        "bounds": bounds,
        "reward_final": None if engine == "simulated" else figures["reward_final"],
    }


def plot(rows: list[Row], path: Path) -> None:
    """Speed-up over the synchronous run by staleness, one panel for each engine."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    figure, panels = plt.subplots(1, len(engines), figsize=(6 * len(engines), 4), squeeze=False)
    for panel, engine in zip(panels[0], engines, strict=True):
        mine = [row for row in rows if row["engine"] == engine]
        for policy in dict.fromkeys(row["over_age"] for row in mine if row["max_staleness"]):
            points = [row for row in mine if row["max_staleness"] == 0 or row["over_age"] == policy]
            panel.plot(
                [row["max_staleness"] for row in points], [row["speedup"] for row in points], marker="o", label=policy
            )
        masked = [row for row in mine if row["over_age"] == "mask" and row["max_staleness"]]
        etas, bounds = ([row[key] for row in masked] for key in ("max_staleness", "bound"))
        panel.plot(etas, bounds, linestyle="--", color="grey", label="bound")
        panel.set_title(label(engine))
        panel.set_xlabel("max_staleness (policy versions)")
        panel.set_ylabel("groups per second, relative to synchronous")
        panel.set_ylim(bottom=0)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
