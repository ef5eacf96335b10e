"""The error of the predictions of `streamrl plan`, against runs.

    python benchmarks/bench_plan.py [--runs FOLDER] [--cases NAME ...]

Each case is calibrated as a user's configuration is, by a short run of its own. Then runs of the same settings and of
others are compared with the planner's predictions from that one calibration, for the same steps: a short run, in which
staleness still builds up, is not compared with a steady state. Where a run learns, its later steps have other
responses, and groups that need no gradient: they are compared apart, since no calibration can predict them.

Runs of a case are kept in FOLDER if one is given; those that are there are not made again, so that predictions can be
compared again with runs of a quiet machine. A prediction has only the cores that other work left to the run.
Generation is SIMULATED in the case with that name. The last figure is the processor time for the simulation of a
thousand gservers.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
from common import EXAMPLES, NO_FILES, Row, parser_of, report, run_example, words_of
from throughput import SIMULATED

from streamrl.config import Config, from_dict, load
from streamrl.planner.calibration import Calibration, make_short_run, read_calibration
from streamrl.planner.simulation import Costs, simulate
from streamrl.records.metrics import StepFigures, mean_age, total_ages
from streamrl.records.view import read_run

RATE_TOLERANCE, AGE_TOLERANCE = 0.1, 0.5
"""How far the throughput may be off, as a share, and the mean age, in versions."""
QUIET: Mapping[str, object] = {
    "run.stop_at_reward": 2,
    **NO_FILES,
    "evaluation.every": "never",
    "evaluation.at_start": "false",
    "evaluation.at_end": "false",
}
"""Settings of runs that make all of their steps, and do nothing that the planner does not simulate."""


class Case(NamedTuple):
    name: str
    example: str
    settings: Mapping[str, object]
    runs: tuple[tuple[Mapping[str, object], int], ...]
    """Settings that differ from the calibrated ones, and how many steps are made with them."""
    learns: bool = False
    """So quickly that later steps have other responses than those of the calibration: both stretches are compared."""


ETA = "staleness.max_staleness"
CASES = (
    Case("copy_scratch", "copy_scratch", {}, (({}, 80), ({ETA: 0}, 50)), learns=True),
    Case("smollm2_addition", "smollm2_addition", {}, (({}, 16),), learns=True),
    Case("chain_sum", "chain_sum", {}, (({}, 8),), learns=True),
    Case(
        "SIMULATED long tail",
        "copy_scratch",
        SIMULATED,
        (({}, 60), ({ETA: 2}, 40), ({"staleness.over_age": "wait"}, 40)),
    ),
)


def run(case: Case, folder: Path, changed: Mapping[str, object], steps: int) -> Path:
    """The folder of a run of `case` with settings that are `changed`; made unless it is there."""
    name = "-".join(["run", *(f"{key.rpartition('.')[2]}-{value}" for key, value in changed.items())])
    if (folder / name / "final.json").exists():
        return folder / name
    settings = {**case.settings, **QUIET, **changed, "run.total_train_steps": steps}
    settings |= {"run.dir": folder, "run.name": name}
    run_example(example(case), settings)
    return folder / name


def example(case: Case) -> Path:
    return EXAMPLES / f"{case.example}.toml"


def calibration_of(case: Case, folder: Path) -> Calibration:
    """Made as `streamrl plan` makes it, unless it is there."""
    if not (folder / "calibration").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = load(example(case), words_of({**case.settings, **QUIET}))
        make_short_run(config, folder=folder, tell=lambda _: None)
    return read_calibration(folder / "calibration")


class Stretch(NamedTuple):
    """A part of a run, from the end of one step to the end of another."""

    name: str
    learned: bool
    """The policy is no longer the one that was calibrated."""
    steps: Sequence[StepFigures]
    """The first one only begins it."""

    def predicted(self, config: Config, costs: Costs) -> dict[str, float]:
        """Simulate a run of `config` at `costs` in these steps."""
        found = simulate(config, costs, steps=len(self.steps) - 1, warm_up=self.steps[0].step)
        return {
            "groups_per_second": found.groups_per_second,
            "tokens_per_second": found.tokens_trained_per_second,
            "mean_token_age": found.mean_token_age,
            "masked_share": found.masked_share,
        }

    def figures(self) -> dict[str, float]:
        begun, *steps = self.steps
        seconds = steps[-1].time - begun.time
        groups, tokens, masked = (
            sum(step.metrics.get(name, 0.0) for step in steps) for name in ("groups", "tokens_trained", "tokens_masked")
        )
        return {
            "groups_per_second": groups / seconds,
            "tokens_per_second": tokens / seconds,
            "mean_token_age": mean_age(total_ages(steps)) or 0.0,
            "masked_share": masked / (tokens + masked),
        }


def stretches(case: Case, run_dir: Path, *, calibrated: int) -> Iterator[Stretch]:
    """Yield the stretches of a run in a case that was calibrated with so many steps after the first."""
    steps = read_run(run_dir).steps
    if case.learns:
        yield Stretch(f"steps 2 to {calibrated + 1}", False, steps[: calibrated + 1])
        yield Stretch(f"steps {calibrated + 2} to {len(steps)}", True, steps[calibrated:])
    else:
        yield Stretch(f"steps {len(steps) // 5 + 1} to {len(steps)}", False, steps[len(steps) // 5 - 1 :])


def compared(case: Case, folder: Path) -> Iterator[Row]:
    """A row for each stretch of each run of `case`, which are made in `folder` unless they are there."""
    print(f"{case.name}: calibration …", flush=True)
    calibration = calibration_of(case, folder)
    for changed, steps in case.runs:
        print(f"{case.name}: {words_of(changed) or 'the same settings'}, {steps} steps …", flush=True)
        run_dir = run(case, folder, changed, steps)
        config = load(run_dir / "config.toml")
        cores = read_calibration(run_dir).costs.cores  # what other work left of them in this run
        costs = msgspec.structs.replace(calibration.costs, cores=cores)
        for stretch in stretches(case, run_dir, calibrated=calibration.steps):
            predicted, actual = stretch.predicted(config, costs), stretch.figures()
            rate = predicted["groups_per_second"] / actual["groups_per_second"] - 1
            age = predicted["mean_token_age"] - actual["mean_token_age"]
            yield {
                "case": case.name,
                "simulated_generation": config.gserver.engine == "simulated",
                "changed": words_of(changed),
                "stretch": stretch.name,
                "learned": stretch.learned,
                "predicted": predicted,
                "actual": actual,
                "rate_error": rate,
                "age_error": age,
                "met": abs(rate) <= RATE_TOLERANCE and abs(age) <= AGE_TOLERANCE,
                "calibration_steps": calibration.steps,
                "calibration_seconds": calibration.seconds,
                "calibration_cores": calibration.costs.cores,
                "cores": cores,
            }


def thousand_gservers() -> Row:
    """How much processor time the simulation of a large run takes."""
    config = from_dict(
        {
            "staleness": {"max_staleness": 2},
            "trainer": {"batch_groups": 1000},
            "rollout": {"group_size": 8, "workers": 32},
            "gserver": {"count": 1000, "max_running": 32},
        }
    )
    costs = Costs(
        response_lengths=[[length, 2 * length, 4 * length, 8 * length] * 2 for length in (200, 500, 1000)],
        prompt_tokens=200.0,
        step_seconds=0.01,
        request_seconds=0.0003,
        prompt_token_seconds=2e-5,
        train_seconds=5.0,
        train_token_seconds=2e-6,
    )
    began = time.process_time()
    found = simulate(config, costs, steps=10, warm_up=4)
    return {
        "gservers": 1000,
        "steps": 14,
        "responses": 14 * 8000,
        "events": found.events,
        "seconds": time.process_time() - began,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, help="where runs are kept, and taken from if they are there")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="by default all")
    options = parser.parse_args()
    chosen = [case for case in CASES if not options.cases or case.name in options.cases]
    with nullcontext(options.runs) if options.runs else tempfile.TemporaryDirectory() as folder:
        rows = list(
            itertools.chain.from_iterable(compared(case, Path(folder) / case.name.replace(" ", "_")) for case in chosen)
        )
    settings = {
        "quick": bool(options.cases),
        "rate_tolerance": RATE_TOLERANCE,
        "age_tolerance": AGE_TOLERANCE,
        "simulated": SIMULATED,
        "thousand_gservers": thousand_gservers(),
    }
    report("bench_plan", settings, rows)


if __name__ == "__main__":
    main()
