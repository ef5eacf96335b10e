"""Staleness that a run bears: real asynchronous runs over tasks, `max_staleness` (η), objectives and seeds.

    python benchmarks/staleness.py                                   # all runs: many hours; can be stopped and resumed
    python benchmarks/staleness.py --quick                           # four short runs, in minutes: nothing is kept
    python benchmarks/staleness.py --only task=sort,copy eta=4,8     # some of the runs
    python benchmarks/staleness.py --dry-run                         # list the missing runs and estimate their time
    python benchmarks/staleness.py --report                          # tables and plot of the finished runs

Each run is a process of its own, started as a user would start it, with the settings of an example and of its
`Cell`. It takes three times as many steps as its task needs to be learned at η = 0, to see whether the reward lasts.

A finished run is a row of `results/latest/staleness.json`, written when the run ends. It is not run again while these
three are unchanged:

- its cell (task, objective, η, over-age policy, seed);
- the settings of its example and of its cell (defaults are part of the code);
- the code: every Python file of `streamrl/` as a syntax tree without docstrings, and every C file, except for files
  that only start or show a run (`NOT_CODE`). Comments, documentation, tests and benchmarks do not count.

`--any-code` accepts rows of other code as finished, too. A run that fails is named, and leaves no row.

The figures of runs:

- a *curve* is the reward of each policy version: that of the training batch which the version wrote. Runs keep the mean
  age of each batch, so a batch of step i and age a was written by version i − 1 − a. All curves of a task end at the
  same version, the last one that the stalest run has;
- *area* is the mean of the curve, relative to the mean of the synchronous runs of the task; *plateau error* is 1 minus
  the reward over the last third;
- the claims about area, plateau error and collapses, with their bounds, are in `benchmarks/criterion.py`;
- *steps to 0.9* count up to the first reward of `NEARLY`, smoothed by the mean over `WINDOW` steps;
- *tokens per response* are the tokens that entered a loss, by the responses in training batches; *generated* are the
  tokens of all finished responses, dropped ones included.

With `--jobs` several runs of small models share the machine. Learning does not suffer, except that pools which wait for
a core shift the ages within their bound. The claim about area per second compares runs of one state of the code: make
all η of a seed one after another, as the command does, so that they share the machine alike.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from common import KEPT, ROOT, commit, latest, parser_of, read_results, show, write_results
from criterion import DROP, Claim, claims, collapses, errors, faster, largest_drop, no_collapse
from numpy.typing import NDArray
from rich.console import Console

from streamrl.config import load

NAME, QUICK_NAME = "staleness", "staleness-quick"
TASK_CODE = "streamrl.rollout.tasks"
WINDOW = 3
"""Steps over which a reward is smoothed."""
LEARNED, NEARLY = 0.95, 0.9
STALEST = 8
"""Largest η of the claims: a run has written rewards for this many versions less than it has steps."""
CLAIMED = (1, 4, 8)
"""The η of the claims."""
LEARNING_SEEDS = 7 / 8
"""A task counts if at least this share of its synchronous runs learn it."""
EVERY = 5
"""Steps that share one figure in a kept curve, except for the reward and the time, which each step has."""
NOT_CODE = ("launch/", "cli.py", "report.py", "plots.py", "records.py", "records/", "__main__.py")
"""Parts of streamrl/ that start a run or show it, and so do not change its learning."""
DEADLINE_SECONDS = 5400.0
"""Longest time of one run."""
STOPPING_SECONDS = 60.0
"""Longest time that a run may take to end after SIGTERM."""


# --- the runs ------------------------------------------------------------------------------------


class Task(NamedTuple):
    example: str
    settings: Mapping[str, Any]
    """By section and key, on top of the example."""
    steps: int
    """Three times the steps to a smoothed reward of `LEARNED` at η = 0, seed 0. Measured for `increment` (67 steps),
    `sort` (70) and `modular-addition` (211); a guess for the other tasks."""
    seconds: float
    """A guess at the time of one run, used until there is a row."""


def _scratch(function: str, *, steps: int, seconds: float = 120.0, **settings: Any) -> Task:
    """The example copy_scratch with another data function of `TASK_CODE`; `a__b` stands for the setting `a.b`."""
    others = {key.replace("__", "."): value for key, value in settings.items()}
    return Task("copy_scratch.toml", {"data.path": f"{TASK_CODE}:{function}", **others}, steps, seconds)


TASKS: dict[str, Task] = {
    "copy": _scratch("copy_digits", steps=200),
    "increment": _scratch("increment_digits", steps=200),
    "sort": _scratch("sort_digits", steps=200, data__args__digits=2),  # of three digits 0.91 after 240 steps at η = 0
    "modular-addition": _scratch(  # modulo 10 the reward was 0.61 after 220 steps at η = 0
        "modular_addition", steps=640, seconds=320.0, data__args__modulus=5, rollout__sampling__max_new_tokens=3
    ),
    "repeat": _scratch("repeat_digit", steps=300, rollout__sampling__max_new_tokens=20),
    "smollm2-addition": Task("smollm2_addition.toml", {}, 36, 400.0),
}
LENGTH_TASK = "repeat"
"""The task whose answers differ in length: the one for the over-age policies."""
SIDE_BY_SIDE = ("increment", "sort")
"""The tasks on which all objectives are run."""
SCRATCH = [name for name, task in TASKS.items() if task.example == "copy_scratch.toml" and name != LENGTH_TASK]
UNSTEADY = "modular-addition"
"""A task on which synchronous runs end on different plateaus; no claim counts it."""
STEADY = [name for name in SCRATCH if name != UNSTEADY]
PRETRAINED = [name for name, task in TASKS.items() if task.example != "copy_scratch.toml"]

_DECOUPLED = {
    "loss": "ppo",
    "proximal": "auto",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "behavior_weight_level": "token",
    "behavior_weight_limit": "truncate",
    "behavior_weight_cap": 5.0,
    "behavior_weight_floor": 0.0,
    "behavior_kl_coef": 0.0,
    "loss_aggregation": "token",
}

OBJECTIVES: dict[str, Mapping[str, Any]] = {
    "default": {},
    "drift": {},
    "constant": {},
    "decoupled": _DECOUPLED,
    "ppo": _DECOUPLED | {"proximal": "behavior"},
    "truncated": _DECOUPLED | {"behavior_weight_cap": 2.0},
    "masked": _DECOUPLED | {"behavior_weight_limit": "mask", "behavior_weight_floor": 0.5},
    "gspo": _DECOUPLED
    | {
        "loss": "gspo",
        "proximal": "behavior",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "loss_aggregation": "sequence",
    },
    "cispo": _DECOUPLED | {"loss": "cispo", "proximal": "behavior", "clip_low": 1.0, "clip_high": 4.0},
    "ipo": _DECOUPLED
    | {
        "loss": "benchmarks.recipes:probability_masked",
        "proximal": "behavior",
        "behavior_weight_level": "none",
    },
}
"""Settings of [algorithm] by name. The first three have the example's. All but `default` have steps of full
length (`staleness.lr_by_contrast`), and all but `default` and `drift` a constant staleness (`staleness.most_drift`).
The others name all of their settings, so that a change of defaults does not change them. `decoupled` has the clip
around the policy at the start of the step; `truncated` is the same with the limit of truncated importance sampling in
verl's and slime's examples, `masked` with the limit of IcePop in verl and AReaL; `gspo` and `cispo` are the recipes of
docs/algorithms.md, `ipo` is prime-rl's (`benchmarks/recipes.py`)."""

ETAS = (0, 1, 2, 4, 8, 16)
"""All η of the study; 2 and 16 with a constant staleness alone."""
STALE_ETAS = (1, 2, 4, 8)
"""Where the other objectives are run on the first task of `SIDE_BY_SIDE`: at η = 0 weights differ from 1 by no more
than rounding, and at 16 data are hardly older than at 8 in runs as short as these (5 versions on average, and 4)."""
CLOSE_ETAS = (4, 8)
"""Where they are run on its other task."""
POLICY_ETAS = (1, 2, 4)
"""Where the over-age policies are compared."""
SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5, 6, 7)
"""Further seeds of the default objective at `DECIDING_ETAS`: three decide little (`benchmarks/criterion.py`)."""
DECIDING_ETAS = (0, *CLAIMED)


class Cell(NamedTuple):
    """One run."""

    task: str
    objective: str
    eta: int
    over_age: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.objective}, η {self.eta}, {self.over_age}, seed {self.seed}"


def study() -> list[Cell]:
    """All runs, the most informative first; within a part all runs of one seed come before the next seed."""
    others = [objective for objective in OBJECTIVES if objective != "default"]
    parts: list[tuple[tuple[int, ...], list[tuple[str, str, int, str]]]] = [
        (SEEDS, [(task, "default", eta, "mask") for task in STEADY for eta in DECIDING_ETAS]),
        (
            SEEDS,
            [
                (task, objective, eta, "mask")
                for task, etas in zip(SIDE_BY_SIDE, (STALE_ETAS, CLOSE_ETAS), strict=True)
                for objective in others
                for eta in etas
            ],
        ),
        (
            SEEDS,
            [(task, "default", 0, "mask") for task in (LENGTH_TASK, UNSTEADY)]
            + [
                (LENGTH_TASK, "constant", eta, over_age) for eta in POLICY_ETAS for over_age in ("mask", "wait", "drop")
            ],
        ),
        (SEEDS, [(task, "default", eta, "mask") for task in PRETRAINED for eta in DECIDING_ETAS]),
        (SEEDS, [(task, "constant", eta, "mask") for task in SCRATCH for eta in ETAS[1:]]),
        (SEEDS, [(task, "constant", eta, "mask") for task in PRETRAINED for eta in STALE_ETAS]),
        (MORE_SEEDS, [(task, "default", eta, "mask") for task in (*STEADY, *PRETRAINED) for eta in DECIDING_ETAS]),
    ]
    cells = [Cell(*kind, seed) for seeds, part in parts for seed in seeds for kind in part]
    return list(dict.fromkeys(cells))


def quick() -> list[Cell]:
    """Enough runs to see that the whole study works."""
    return [
        Cell(SIDE_BY_SIDE[0], objective, eta, "mask", 0) for objective in ("default", "decoupled") for eta in (0, 4)
    ]


QUICK_STEPS = 40


def chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The `cells` that match all of `only` (`field=value,value`); exit if none does."""
    wanted: dict[str, set[str]] = {}
    for text in only:
        name, equals, values = text.partition("=")
        if name not in Cell._fields or not equals:
            raise SystemExit(f"--only {text}: write FIELD=VALUE,…; fields are {', '.join(Cell._fields)}")
        known = {str(getattr(cell, name)) for cell in cells}
        wanted[name] = set(values.split(","))
        if unknown := wanted[name] - known:
            raise SystemExit(
                f"--only {text}: there is no {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
            )
    found = [cell for cell in cells if all(str(getattr(cell, name)) in values for name, values in wanted.items())]
    if not found:
        raise SystemExit(f"--only {' '.join(only)}: no run of the study is all of that at once")
    return found


def settings_of(cell: Cell, *, steps: int) -> dict[str, Any]:
    """Overrides of the example of a cell's task, by section and key."""
    task = TASKS[cell.task]
    return {
        **task.settings,
        "run.seed": cell.seed,
        "run.total_train_steps": steps,
        "run.stop_at_reward": 1e9,  # never: the reward has to last
        "staleness.max_staleness": cell.eta,
        "staleness.over_age": cell.over_age,
        **({} if cell.objective == "default" else {"staleness.lr_by_contrast": "false"}),
        **({} if cell.objective in ("default", "drift") else {"staleness.most_drift": 0.0}),
        "trainer.save_at_end": "false",
        "trainer.save_every": "never",
        "metrics.plots": "false",
        "metrics.sinks": "[]",
        **{f"algorithm.{name}": value for name, value in OBJECTIVES[cell.objective].items()},
    }


def arguments_of(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def settings_digest(cell: Cell, *, steps: int) -> str:
    """A digest of the settings of a run's example and of its cell; defaults are part of the code."""
    example = tomllib.loads((ROOT / "examples" / TASKS[cell.task].example).read_text())
    said = [example, arguments_of(settings_of(cell, steps=steps))]
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=6).hexdigest()


def code_digest(package: Path = ROOT / "streamrl") -> str:
    """A digest of all code that may change the learning of a run, without comments and docstrings."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package).as_posix()
        if path.suffix not in (".py", ".c", ".h") or name.startswith(NOT_CODE):
            continue
        digest.update(name.encode())
        digest.update(_bare(path.read_text()).encode() if path.suffix == ".py" else path.read_bytes())
    return digest.hexdigest()


def _bare(source: str) -> str:
    """The syntax tree of a module, without strings that stand alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _stands_alone(part)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _stands_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# --- one run -------------------------------------------------------------------------------------


class RunFailed(Exception):
    """A run that failed or did not end, with the end of its output."""


def run(cell: Cell, *, steps: int) -> dict[str, Any]:
    """Make one run as a user would start it; return its row. Raises `RunFailed`."""
    with tempfile.TemporaryDirectory(prefix="staleness-") as folder:
        where = {"run.dir": folder, "run.name": "run"}
        example = str(ROOT / "examples" / TASKS[cell.task].example)
        arguments = arguments_of(settings_of(cell, steps=steps) | where)
        command = [sys.executable, "-m", "streamrl", "run", example, *arguments]
        begin = time.time()
        with open(Path(folder) / "said", "w+") as said:
            running = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT)
            try:
                code: int | str = running.wait(DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                code = f"not over after {DEADLINE_SECONDS:.0f} s"
            finally:
                if running.poll() is None:
                    running.terminate()
                    try:
                        running.wait(STOPPING_SECONDS)
                    except subprocess.TimeoutExpired:
                        running.kill()
            if code:
                said.seek(0)
                raise RunFailed(f"{cell}: {code}; {' '.join(command)} said last:\n{said.read()[-3000:]}")
        return row_of(cell, Path(folder) / "run") | {"wall_seconds": round(time.time() - begin)}


def row_of(cell: Cell, run_dir: Path) -> dict[str, Any]:
    """The row of a finished run."""
    reports = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    final = json.loads((run_dir / "final.json").read_text())
    group_size = load(run_dir / "config.toml").rollout.group_size
    metrics = [report["metrics"] for report in reports]
    windows = [reports[first : first + EVERY] for first in range(0, len(reports), EVERY)]
    sampled = np.cumsum([found["tokens_sampled"] for found in metrics])
    responses = group_size * sum(found["groups"] for found in metrics)
    dropped = (final["status"] or {}).get("ledger", {}).get("dropped", 0)
    return {
        **cell._asdict(),
        "steps": len(reports),
        "mean_token_age": short(summary["mean_token_age"] or 0.0),
        "oldest_token_age": summary["oldest_token_age"],
        "masked_share": short(summary["masked_share"] or 0.0),
        "dropped_share": short(dropped / (dropped + responses / group_size)),
        "response_tokens_trained": short(sum(found["tokens_trained"] for found in metrics) / responses),
        "response_tokens_generated": short(
            (int(sampled[-1]) + final["tokens_dropped"]) / (responses + dropped * group_size)
        ),
        "curve": {
            "reward": [round(found["reward_mean"], 3) for found in metrics],
            "seconds": [round(found["run_seconds"], 1) for found in metrics],
            "tokens": [int(sampled[min(first + EVERY, len(reports)) - 1]) for first in range(0, len(reports), EVERY)],
            "effective_sample_size": [least(window, "effective_sample_size") for window in windows],
            "grad_norm": [largest(window, "grad_norm") for window in windows],
            "age": [short(mean_age(window)) for window in windows],
        },
    }


def least(window: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """The least value over the steps of `window` that have it (reports leave out figures that are not numbers)."""
    return min((short(report["metrics"][metric]) for report in window if metric in report["metrics"]), default=None)


def largest(window: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    return max((short(report["metrics"][metric]) for report in window if metric in report["metrics"]), default=None)


def mean_age(window: Sequence[Mapping[str, Any]]) -> float:
    """The mean age of the tokens that entered a loss, in versions; 0 without any."""
    tokens = [(int(age), count) for report in window for age, count in report["token_ages"].items()]
    return sum(age * count for age, count in tokens) / max(1, sum(count for _, count in tokens))


def short(value: float) -> float:
    """To three significant digits."""
    return float(f"{value:.3g}")


# --- the results ---------------------------------------------------------------------------------


class Results:
    """The rows of all finished runs in `results/latest/`, or the kept rows while there are none.

    Several processes may add rows: each reads the file again under a lock and replaces it as a whole.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def rows(self) -> list[dict[str, Any]]:
        files = (latest(f"{self._name}.json"), KEPT / f"{self._name}.json")
        there = next((file for file in files if file.exists()), None)
        found: list[dict[str, Any]] = read_results(there)["rows"] if there else []
        return found

    def add(self, row: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Add a row, in place of an earlier one of the same cell."""
        with open(latest(f".{self._name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rows = [other for other in self.rows() if cell_of(other) != cell_of(row)]
            rows.append(dict(row))
            write_results(self._name, settings, rows, measured_at=commits(rows), row_per_line=True)


def cell_of(row: Mapping[str, Any]) -> Cell:
    return Cell(*(row[name] for name in Cell._fields))


def commits(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of the code that `rows` were measured at, as one: their names, the latest date."""
    found = {row["commit"]["id"]: row["commit"]["date"] for row in rows}
    return {
        "id": " and ".join(sorted(name for name in found if name)) or None,
        "date": max((date for date in found.values() if date), default=None),
        "changed": any(row["commit"]["changed"] for row in rows),
    }


# --- figures of the runs -------------------------------------------------------------------------


def smoothed(rewards: Sequence[float]) -> list[float]:
    """The mean of each and up to `WINDOW - 1` before it."""
    return [fmean(rewards[max(0, last - WINDOW + 1) : last + 1]) for last in range(len(rewards))]


def first_at(rewards: Sequence[float], level: float) -> int | None:
    """The first step, from 1, with a smoothed reward of at least `level`, or None. The first `WINDOW - 1` steps, which
    have too few to be smoothed over, do not count."""
    found = smoothed(rewards)
    return next((step + 1 for step in range(WINDOW - 1, len(found)) if found[step] >= level), None)


def worst_after_learned(rewards: Sequence[float]) -> float | None:
    """The least smoothed reward from the step at which the task was learned; None if it was not."""
    learned = first_at(rewards, LEARNED)
    return None if learned is None else min(smoothed(rewards)[learned - 1 :])


def by_version(row: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return the reward of each policy version of a run, as `rewards_by_version`."""
    rewards = row["curve"]["reward"]
    steps = np.arange(len(rewards))
    ages = np.interp(steps, steps[::EVERY][: len(row["curve"]["age"])], row["curve"]["age"])
    return rewards_by_version(rewards, ages)


def rewards_by_version(rewards: Sequence[float], ages: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]:
    """Return the reward of each policy version, given the reward and the mean age of the batch of each step:
    `[versions]`, `STALEST + 1` fewer than steps."""
    steps = np.arange(len(rewards))
    writers = np.maximum.accumulate(steps - np.asarray(ages, dtype=float))
    return np.interp(steps[: max(1, len(steps) - STALEST - 1)], writers, np.asarray(rewards, dtype=float))


def curves(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[NDArray[np.float64]]]:
    """Return the curves of `rows` by task; each point is the mean of `EVERY` versions, so of at least 40 prompts."""
    found: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for row in rows:
        curve = by_version(row)
        whole = max(EVERY, len(curve) // EVERY * EVERY)
        found[row["task"]].append(np.resize(curve, whole).reshape(-1, EVERY).mean(axis=1))
    return found


def rows_of(rows: Sequence[Mapping[str, Any]], *, eta: int, objective: str = "default") -> list[Mapping[str, Any]]:
    """Return the rows of an objective at `eta`, without other policies for over-age tokens."""
    return [row for row in rows if (row["eta"], row["objective"], row["over_age"]) == (eta, objective, "mask")]


class Spread(NamedTuple):
    """A figure of several runs, some of which may lack it."""

    values: list[float]
    runs: int

    @property
    def mean(self) -> float:
        return fmean(self.values)

    def said(self, form: str = ".2f") -> str:
        """Mean, least to most, and how many runs do not have it."""
        if not self.values:
            return f"never ({self.runs})" if self.runs else "–"
        text = f"{self.mean:{form}}"
        if len(self.values) > 1:
            text += f" ({min(self.values):{form}} to {max(self.values):{form}})"
        missing = self.runs - len(self.values)
        return f"{text}, {missing} never" if missing else text


class Kind(NamedTuple):
    """Runs that differ only in the seed."""

    task: str
    objective: str
    eta: int
    over_age: str


class Summary(NamedTuple):
    """Figures of the runs of one kind."""

    kind: Kind
    runs: int
    collapsed: int
    steps_to_nearly: Spread
    worst: Spread
    """Least smoothed reward after it was learned."""
    area: Spread
    """Against the mean of the synchronous runs of the task."""
    error: Spread
    """1 minus the mean reward over the last third of the versions."""
    sample_size: Spread
    """Effective sample size, the least of any step, as a share of the tokens."""
    rejected: Spread
    """Masked tokens and dropped groups, as a share."""
    length_ratio: Spread
    """Tokens in the loss of a response in a training batch, relative to the tokens of a finished response."""


def summaries(rows: Sequence[Mapping[str, Any]]) -> list[Summary]:
    """One for each kind, in the order of the study."""
    synchronous = curves(rows_of(rows, eta=0))
    order = {cell[:4]: number for number, cell in enumerate(study())}
    kinds: dict[Kind, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[Kind(*cell_of(row)[:4])].append(row)

    def place(kind: Kind) -> tuple[int, int, int]:
        return list(TASKS).index(kind.task) if kind.task in TASKS else len(TASKS), order.get(tuple(kind), 0), kind.eta

    return [_summary(kind, kinds[kind], synchronous.get(kind.task, [])) for kind in sorted(kinds, key=place)]


def _summary(kind: Kind, rows: Sequence[Mapping[str, Any]], synchronous: Sequence[NDArray[np.float64]]) -> Summary:
    def spread(values: Sequence[float | None]) -> Spread:
        return Spread([value for value in values if value is not None], len(rows))

    rewards = [row["curve"]["reward"] for row in rows]
    mine = curves(rows)[kind.task]
    threshold = max([DROP, *map(largest_drop, synchronous)])
    yardstick = fmean(curve.mean() for curve in synchronous) if synchronous else None
    return Summary(
        kind=kind,
        runs=len(rows),
        collapsed=sum(collapses(curve, threshold) for curve in mine),
        steps_to_nearly=spread([first_at(each, NEARLY) for each in rewards]),
        worst=spread([worst_after_learned(each) for each in rewards]),
        area=spread([float(curve.mean()) / yardstick if yardstick else None for curve in mine]),
        error=spread([float(errors(curve)) for curve in mine]),
        sample_size=spread(
            [min((v for v in row["curve"]["effective_sample_size"] if v is not None), default=None) for row in rows]
        ),
        rejected=spread([row["masked_share"] + row["dropped_share"] for row in rows]),
        length_ratio=spread([row["response_tokens_trained"] / row["response_tokens_generated"] for row in rows]),
    )


def found_claims(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Claim]]:
    """Return the claims at each η of `CLAIMED`, and then of all η together, about the tasks that count: at least seven
    of eight synchronous runs learn them."""
    fresh = rows_of(rows, eta=0)
    reached: dict[str, list[bool]] = defaultdict(list)
    for row in fresh:
        reached[row["task"]].append(max(smoothed(row["curve"]["reward"])) >= LEARNED)
    learned = {task for task, found in reached.items() if fmean(found) >= LEARNING_SEEDS}
    synchronous = curves(fresh)
    found: list[tuple[str, Claim]] = []
    pooled: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for eta in CLAIMED:
        mine = [row for row in rows_of(rows, eta=eta) if row["task"] in learned]
        if mine:
            stale = curves(mine)
            found += [(str(eta), claim) for claim in claims(synchronous, stale, eta=eta)]
            states = {row["commit"]["id"] for row in mine}
            alike = [row for row in fresh if row["commit"]["id"] in states]
            found += [(str(eta), claim) for claim in faster(areas_per_second(alike), areas_per_second(mine))]
            for task, runs in stale.items():
                pooled[task] += runs
    return [*found, ("all", no_collapse(synchronous, pooled))] if found else []


def areas_per_second(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the area of each run over its seconds of training, by task."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[row["task"]].append(float(by_version(row).mean()) / row["curve"]["seconds"][-1])
    return found


def age_cost(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the area that is lost with each version of the mean token age: least squares over the means
    by task and constant η, without `UNSTEADY`: its runs differ more by seed than by η."""
    synchronous = curves(rows_of(rows, eta=0))
    ages, losses = [], []
    for task in (*SCRATCH, *PRETRAINED):
        for eta in STALE_ETAS if task != UNSTEADY else ():
            mine = [row for row in rows_of(rows, eta=eta, objective="constant") if row["task"] == task]
            if mine:
                ages.append(fmean(fmean(row["curve"]["age"]) for row in mine))
                areas = [fmean(float(curve.mean()) for curve in of) for of in (curves(mine)[task], synchronous[task])]
                losses.append(1 - areas[0] / areas[1])
    return float(np.dot(ages, losses) / np.dot(ages, ages))


def missing_runs(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return how many runs with the default objective are missing, and of how many."""
    wanted = [cell for cell in study() if cell.objective == "default" and cell.over_age == "mask"]
    there = {cell_of(row) for row in rows}
    return sum(cell not in there for cell in wanted), len(wanted)


# --- plot ----------------------------------------------------------------------------------------


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the reward by step of each task at the default and, below, the figures of the objectives by η."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = [task for task in TASKS if any(row["task"] == task and row["objective"] == "default" for row in rows)]
    columns = max(3, len(tasks))
    figure, panels = plt.subplots(2, columns, figsize=(3.6 * columns, 7), squeeze=False)
    colours = {eta: plt.get_cmap("viridis")(number / len(ETAS)) for number, eta in enumerate(ETAS)}
    for panel, task in zip(panels[0], tasks, strict=False):
        shown = set()
        for row in sorted(rows, key=lambda row: row["eta"]):
            if row["task"] == task and row["objective"] == "default" and row["over_age"] == "mask":
                label = None if row["eta"] in shown else f"η {row['eta']}"
                shown.add(row["eta"])
                panel.plot(smoothed(row["curve"]["reward"]), color=colours.get(row["eta"]), lw=0.8, label=label)
        panel.axhline(NEARLY, color="grey", ls=":", lw=0.8)
        panel.set(title=f"{task}: default", xlabel="step", ylabel=f"reward, mean of {WINDOW} steps", ylim=(0, 1.02))
        panel.legend(fontsize=7)
    found = [s for s in summaries(rows) if s.kind.task == SIDE_BY_SIDE[0] and s.kind.over_age == "mask"]
    for panel, (title, figure_of) in zip(
        panels[1],
        (
            ("worst reward after it was learned", lambda s: s.worst),
            ("area, relative to synchronous", lambda s: s.area),
            ("least effective sample size", lambda s: s.sample_size),
        ),
        strict=False,
    ):
        for objective in OBJECTIVES:
            mine = sorted(
                (s.kind.eta, figure_of(s)) for s in found if s.kind.objective == objective and figure_of(s).values
            )
            if mine:
                etas = [ETAS.index(eta) if eta in ETAS else eta for eta, _ in mine]
                means = np.array([spread.mean for _, spread in mine])
                low = np.maximum(means - [min(spread.values) for _, spread in mine], 0)
                high = np.maximum([max(spread.values) for _, spread in mine] - means, 0)
                panel.errorbar(etas, means, yerr=[low, high], marker="o", ms=3, capsize=2, label=objective)
        panel.set(title=f"{SIDE_BY_SIDE[0]}: {title}", xlabel="η (versions)", ylim=(0, 1.05))
        panel.title.set_fontsize(9)
        panel.set_xticks(range(len(ETAS)), [str(eta) for eta in ETAS])
        if panel.has_data():
            panel.legend(fontsize=7)
    for panel in [*panels[0, len(tasks) :], *panels[1, 3:]]:
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- the command ---------------------------------------------------------------------------------


class Remaining:
    """An estimate of the time of the missing runs, from the time of the finished ones."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], *, jobs: int) -> None:
        self._jobs = jobs
        self._seconds: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            self._seconds[row["task"]].append(row["wall_seconds"])

    def took(self, cell: Cell, seconds: float) -> None:
        self._seconds[cell.task].append(seconds)

    def seconds(self, left: Sequence[Cell]) -> float:
        of_task = {task: fmean(self._seconds[task][-12:] or [TASKS[task].seconds]) for task in TASKS}
        return sum(of_task[cell.task] / at_once(cell, self._jobs) for cell in left)


def hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def run_missing(cells: Sequence[Cell], results: Results, options: argparse.Namespace, console: Console) -> list[str]:
    """Make the runs of `cells` that have no row, and add their rows; with `--dry-run` only list them. Return the runs
    that failed."""
    failed: list[str] = []
    code = code_digest()
    wanted = {cell: settings_digest(cell, steps=steps_of(cell, quick=options.quick)) for cell in cells}
    missing = left_to_run(wanted, [] if options.quick else results.rows(), code=None if options.any_code else code)
    remaining = Remaining(results.rows(), jobs=options.jobs)
    there = len(cells) - len(missing)
    console.print(f"{there} of {len(cells)} runs are there; the others take about {hours(remaining.seconds(missing))}")
    if options.dry_run:
        console.print("\n".join(str(cell) for cell in missing), highlight=False)
        return failed
    settings = {"quick": options.quick, "window": WINDOW, "seeds": len(SEEDS)}
    with contextlib.suppress(KeyboardInterrupt):
        for cell, found in run_all(list(missing), jobs=options.jobs, quick=options.quick):
            missing.remove(cell)
            if isinstance(found, RunFailed):
                failed.append(str(cell))
                console.print(f"failed: {cell}\n{found}", markup=False, highlight=False)
                continue
            row = found | {"jobs": at_once(cell, options.jobs), "note": options.note, "code": code}
            row |= {"settings": wanted[cell], "commit": commit()}
            results.add(row, settings)
            remaining.took(cell, row["wall_seconds"])
            console.print(
                f"{len(cells) - len(missing)}/{len(cells)} {described(row)}; {hours(remaining.seconds(missing))} left",
                highlight=False,
            )
    return failed


def main() -> None:
    parser = parser_of(__doc__, quick=f"four runs of {QUICK_STEPS} steps, again each time")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FIELD=VALUE,…", help=f"runs by {', '.join(Cell._fields)}"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at once, but for those of a pretrained model; their seconds suffer, what they learn does not",
    )
    parser.add_argument("--note", default="", help="other load of the machine, named under the table with seconds")
    parser.add_argument("--any-code", action="store_true", help="runs of other code count as finished, too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="list the missing runs and estimate their time")
    what.add_argument("--report", action="store_true", help="tables and plot of the finished runs")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: it has to be 1 or more")
    console = Console()
    name = QUICK_NAME if options.quick else NAME
    results = Results(name)
    cells = chosen(quick() if options.quick else study(), options.only)
    failed = [] if options.report else run_missing(cells, results, options, console)
    if options.dry_run:
        return
    rows = [row for row in results.rows() if cell_of(row) in set(cells)]
    if not rows:
        raise SystemExit("there is no finished run to show" if options.report else "no run was finished")
    show(NAME, {"rows": rows})
    picture = latest(f"{name}.png")
    plot(results.rows(), picture)
    console.print(f"results: {latest(f'{name}.json')}, {picture}", soft_wrap=True)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed:\n" + "\n".join(failed))


def steps_of(cell: Cell, *, quick: bool) -> int:
    return QUICK_STEPS if quick else TASKS[cell.task].steps


def left_to_run(wanted: Mapping[Cell, str], rows: Sequence[Mapping[str, Any]], *, code: str | None) -> list[Cell]:
    """The cells that have no row of their settings and of `code` (None: of any code), in their order."""
    there = {
        cell_of(row)
        for row in rows
        if row["settings"] == wanted.get(cell_of(row)) and (code is None or row["code"] == code)
    }
    return [cell for cell in wanted if cell not in there]


def at_once(cell: Cell, jobs: int) -> int:
    """Number of runs that share the machine. A run of a pretrained model computes with several threads; two of them at
    once take several times as long as one after the other, since their threads wait for each other's cores."""
    return 1 if cell.task in PRETRAINED else jobs


def run_all(cells: Sequence[Cell], *, jobs: int, quick: bool) -> Iterator[tuple[Cell, dict[str, Any] | RunFailed]]:
    """Run `cells`, up to `jobs` at once; yield each as it ends. An interrupt waits for the runs that have begun."""
    for threads in sorted({at_once(cell, jobs) for cell in cells}, reverse=True):
        with ThreadPoolExecutor(threads) as pool:
            mine = [cell for cell in cells if at_once(cell, jobs) == threads]
            running = {pool.submit(run, cell, steps=steps_of(cell, quick=quick)): cell for cell in mine}
            try:
                for done in as_completed(running):
                    error = done.exception()
                    if error is not None and not isinstance(error, RunFailed):
                        raise error
                    yield running[done], error if isinstance(error, RunFailed) else done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def described(row: Mapping[str, Any]) -> str:
    """A line about a finished run."""
    rewards = row["curve"]["reward"]
    nearly, worst = first_at(rewards, NEARLY), worst_after_learned(rewards)
    learned = f"{NEARLY} at step {nearly}" if nearly else f"never {NEARLY}"
    after = "" if worst is None else f", worst after it was learned {worst:.2f}"
    return f"{cell_of(row)}: {learned}{after}, {row['wall_seconds']} s"


if __name__ == "__main__":
    main()
