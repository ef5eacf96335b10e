"""Costs of a run, measured from the folder of an existing run or of a short one made for the purpose.

The steps of a run record their tokens and durations. Its heartbeats record generated tokens, decode steps, and the
processor time of each process. Where all processes share the cores of one machine, processor time is used, since
wall-clock seconds also include waiting for a core.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl import config as configuration
from streamrl.config import PACE_SIGMA, Config
from streamrl.config.trainer import ASYNCHRONOUS
from streamrl.errors import ConfigError, StreamRLError
from streamrl.launch.processes import visible_gpus
from streamrl.planner.simulation import Costs
from streamrl.records.metrics import METRICS_FILE, StepFigures, seconds_between
from streamrl.records.table import Column
from streamrl.records.timeline import CHILDREN_SECONDS, PROCESSOR_SECONDS
from streamrl.records.view import Process, RunView, read_run
from streamrl.transport.membership import MACHINE_SECONDS

CALIBRATION_SECONDS = 60.0
"""Longest calibration, in seconds, unless the run has made fewer than `LEAST_STEPS` by then."""
PATIENCE_SECONDS = 180.0
"""Longest calibration in any case, in seconds; for a slower run give a finished one with `--from`."""
ENOUGH_STEPS = 24
LEAST_STEPS = 3
FIRST_STEPS = 1
"""First steps that are left out, because one-time set-up and loading happen in them."""
HEARTBEAT_SECONDS = 0.25
LOOK_SECONDS = 0.25
SAME_COSTS = (
    "model.path",
    "data.path",
    "gserver.engine",
    "gserver.dtype",
    "trainer.backend",
    "trainer.dtype",
    "rollout.sampling.max_new_tokens",
    "rollout.reward.function",
)
"""Keys that costs depend on and that no simulation changes."""
ROLES = ("controller", "model_worker", "gserver", "rollout")
LEAST_CORES = 0.5
"""Cores that a run is assumed to get at least, regardless of other work on its machine."""
NOTABLE_WAIT_SECONDS = 0.005
"""Least difference between the wall-clock and the processor time of a reward that counts as waiting of its own; a
smaller difference counts as waiting for a core."""
NOTABLE_CORES = 0.15
"""Least number of cores in other work that is worth a note."""
END_SECONDS = 60.0
"""Longest time between the signal to stop and the end of a run."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a run, and where they come from."""

    costs: Costs
    of: str
    """Source of the figures, for people to read."""
    steps: int
    seconds: float
    """Length of the part of the run that the figures come from."""
    notes: list[str] = []
    """Values that the run did not record and that were assumed instead."""


def check_plannable(config: Config, *, calibrated: bool) -> None:
    """Raise `ConfigError` if `config` cannot be planned. `calibrated`: costs are known, and no short run is needed."""
    if config.trainer.graph != ASYNCHRONOUS:
        raise ConfigError(
            f'trainer.graph = "{config.trainer.graph}": only the asynchronous graph can be planned; in another one the '
            "controller decides when to generate, and pools do not overlap as they do there"
        )
    if config.gserver.joins and not calibrated:
        raise ConfigError(
            f"gserver.{config.gserver.engine}.addresses names servers that run already, and a short run would leave "
            "its own weights in them; give the folder of a run with --from"
        )


def make_short_run(config: Config, *, folder: Path, tell: Callable[[str], None]) -> Path:
    """Make a short run of `config` below `folder`, without checkpoints; return its folder. `tell` gets the progress.

    Raises `StreamRLError` if the run fails, or makes too few steps in `PATIENCE_SECONDS`.
    """
    run_dir = folder / "calibration"
    file = folder / "calibration.toml"
    file.write_text(configuration.to_toml(_short(config, folder)))
    command = [sys.executable, "-m", "streamrl", "run", str(file)]
    said = folder / "calibration.log"
    began = time.monotonic()
    with said.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as running:
        stopped = False
        try:
            while running.poll() is None and not stopped:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(LOOK_SECONDS)  # returns at once if the run ends; steps are counted by polling
                seconds, steps = time.monotonic() - began, count_lines(run_dir / METRICS_FILE)
                tell(f"a short run: {steps} steps after {seconds:.0f} s")
                enough = ENOUGH_STEPS if seconds < CALIBRATION_SECONDS else FIRST_STEPS + LEAST_STEPS
                stopped = steps >= enough or seconds > PATIENCE_SECONDS
        finally:
            _end(running)
    if count_lines(run_dir / METRICS_FILE) < FIRST_STEPS + LEAST_STEPS:
        if not stopped:
            raise StreamRLError(f"the calibration's run failed:\n{_tail(said)}")
        raise StreamRLError(
            f"a run of this configuration makes fewer than {FIRST_STEPS + LEAST_STEPS} steps in "
            f"{PATIENCE_SECONDS:.0f} s; make a longer run with `streamrl run`, and give its folder with --from"
        )
    return run_dir


def _end(running: subprocess.Popen[bytes]) -> None:
    if running.poll() is None:
        running.terminate()  # a shell makes its background processes ignore SIGINT
        try:
            running.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()


def _short(config: Config, folder: Path) -> Config:
    replace = msgspec.structs.replace
    return replace(
        config,
        run=replace(
            config.run,
            name="calibration",
            dir=str(folder),
            total_train_steps=ENOUGH_STEPS + 1,
            total_train_epochs=None,
            stop_at_reward=None,
            resume_from=None,
        ),
        limits=replace(config.limits, heartbeat_seconds=HEARTBEAT_SECONDS, save_seconds=0.0),
        trainer=replace(
            config.trainer,
            save_at_end=False,
            save_every="never",
            snapshot_every_steps=0,
        ),
        evaluation=type(config.evaluation)(),
        metrics=replace(config.metrics, sinks=[], plots=False),
    )


def read_calibration(run_dir: Path, *, planned: Config | None = None, cores: int | None = None) -> Calibration:
    """Return the costs of the run in `run_dir`.

    `planned` is the configuration to plan; a note is added for each key that affects costs and differs in it. `cores`
    is the number of cores of the run's machine; None: the number of this machine.

    Raises `ConfigError`, which names the missing data, if the folder does not have enough.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder; give the folder of a run, for example runs/addition")
    records = read_run(run_dir)
    config = records.config
    if config is None:
        raise ConfigError(f"{run_dir}: config.toml is missing or cannot be read, so its settings are unknown")
    made, needed = len(records.steps), FIRST_STEPS + LEAST_STEPS
    if made < needed:
        raise ConfigError(
            f"{run_dir}: {METRICS_FILE} has {made} training steps, and {needed} are needed; continue the run"
        )
    for role in ("gserver", "rollout"):
        if not records.of_role(role):
            raise ConfigError(f"{run_dir}: timeline.jsonl is missing, or has no {role} processes, as in a replay")
    steps = records.steps[max(FIRST_STEPS, made // 5) - 1 :]  # queues still fill in the first fifth of a long run
    lengths = [group for step in steps for group in step.response_lengths if group]
    if not lengths:
        raise ConfigError(
            f"{run_dir}: {METRICS_FILE} lacks the lengths of responses (an older version wrote it); make "
            "another run, or leave --from away"
        )
    found = _CalibrationReader(config, records, steps, cores=cores or os.cpu_count() or 1).calibration(run_dir.name)
    others = [] if planned is None else [key for key in SAME_COSTS if value_of(config, key) != value_of(planned, key)]
    notes = [f"the run had {key} = {value_of(config, key)!r}: its costs are taken all the same" for key in others]
    return msgspec.structs.replace(found, notes=[*found.notes, *notes])


def value_of(config: Config, key: str) -> object:
    """Return the value of `key` in `config`, for example of `trainer.lr`."""
    found: object = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


class _CalibrationReader:
    """The figures of a run from the end of the first of `steps` to the end of the last one."""

    def __init__(self, config: Config, records: RunView, steps: Sequence[StepFigures], *, cores: int) -> None:
        self._config = config
        self._records = records
        self._lengths = [group for step in steps for group in step.response_lengths if group]
        self._begin, self._end = steps[0].time, steps[-1].time
        self._steps = steps[1:]
        self._gaps = [seconds_between(before, after) for before, after in itertools.pairwise(steps)]
        self._cores = cores
        self._notes: list[str] = []
        self._on_cpu = config.run.device == "cpu" or (config.run.device == "auto" and not visible_gpus())
        self._told = any(PROCESSOR_SECONDS in process.stats.names for process in records.processes.values())

    def calibration(self, name: str) -> Calibration:
        """Return all costs, with notes on assumptions."""
        config, groups = self._config, self._sum("groups")
        done = self._counted("rollout", "groups_done_total") or groups
        simulated = not config.gserver.traits.computes
        if not self._told:
            self._notes.append(
                "the run has no processor times of processes (an older version made it): seconds of the "
                "clock are taken, in which waiting for a core counts as work"
            )
        decode = self._decode()
        gain = self._trainer_gain()
        train = self._mean("train_seconds")
        publish = max(0.0, self._mean("publish_seconds") - self._mean("pause_seconds"))
        if self._on_cpu and self._told:
            threads = config.trainer.workers * config.trainer.threads
            used = self._used("model_worker") / len(self._steps)
            publish *= gain
            train = min(train, max(0.1 * used, used - publish) / threads)
        fixed = min(train, gain * self._mean("update_seconds"))
        prompt_tokens = self._prompt_tokens()
        tokens = (self._sum("tokens_sampled") + prompt_tokens * groups) / len(self._steps)
        rejected = self._counted("rollout", "groups_rejected_total") + self._counted("rollout", "groups_filtered_total")
        responses = (done + rejected) * sum(map(len, self._lengths)) / len(self._lengths)
        worker = self._counted("rollout", PROCESSOR_SECONDS)
        reward = (worker / 2 + self._counted("rollout", CHILDREN_SECONDS)) / max(1.0, responses)
        waits = self._counted("rollout", "reward_busy_seconds_total") / max(1.0, responses) - reward
        control = self._counted("controller", PROCESSOR_SECONDS)
        if simulated:
            control += self._used("gserver")
        others = self._others()
        if others > NOTABLE_CORES:
            self._notes.append(
                f"other work on the machine kept {others:.1f} of its {self._cores} cores busy: the plan "
                "assumes that this continues"
            )
        gaps = [
            gap - step.metrics.get("wait_seconds", 0.0) - step.metrics.get("train_seconds", 0.0)
            for gap, step in zip(self._gaps, self._steps, strict=True)
        ]
        costs = Costs(
            response_lengths=self._lengths,
            group_size=config.rollout.group_size,
            prompt_tokens=prompt_tokens,
            step_seconds=decode[0],
            request_seconds=decode[1],
            prompt_token_seconds=decode[2],
            pace_sigma=PACE_SIGMA if simulated else 0.0,
            group_seconds=worker / 2 / max(1.0, done + rejected),
            reward_seconds=reward,
            reward_wait_seconds=waits if waits > NOTABLE_WAIT_SECONDS else 0.0,
            rewards_at_once=any(
                (process.stats.column("reward_calls_at_once") > 1).any() for process in self._records.of_role("rollout")
            ),
            overhead_seconds=control / groups,
            train_seconds=fixed,
            train_token_seconds=max(0.0, train - fixed) * config.trainer.workers / max(1.0, tokens),
            between_seconds=gain * max(0.0, float(np.median(gaps))),
            publish_seconds=publish,
            pause_seconds=gain * self._mean("pause_seconds"),
            rejected_share=rejected / max(1.0, done + rejected),
            gserver_threads=config.gserver.threads,
            trainer_threads=config.trainer.threads,
            cores=max(LEAST_CORES, self._cores - others) if self._told else None,
            gservers_on_cores=self._on_cpu and not simulated and self._told,
            trainer_on_cores=self._on_cpu and self._told,
        )
        if self._on_cpu:
            self._notes.append(f"two threads are assumed to compute {costs.thread_gain:g} times as much as one")
        return Calibration(costs=costs, of=name, steps=len(self._steps), seconds=sum(self._gaps), notes=self._notes)

    def _trainer_gain(self) -> float:
        """Return the share of a core that each computing thread of the trainer got; 1 if it had a core for itself."""
        if not (self._on_cpu and self._told):
            return 1.0
        threads = self._config.trainer.workers * self._config.trainer.threads
        wall = (self._sum("train_seconds") + self._sum("publish_seconds")) * threads
        return min(1.0, self._used("model_worker") / wall) if wall else 1.0

    def _others(self) -> float:
        """Return the cores kept busy by other work on the machine; 0 if unknown or if the run had several hosts."""
        machine = self._counted("controller", MACHINE_SECONDS)
        ours = sum(self._used(role) for role in ROLES)
        watched = self._added("controller", lambda process: np.where(process.began_anew, 0.0, np.diff(process.times)))
        return min(max(0.0, machine - ours) / watched, self._cores) if watched else 0.0

    def _decode(self) -> tuple[float, float, float]:
        """Return the seconds of a decode step, of each request in it, and of each prompt token.

        A non-negative least squares fit of the work of each gserver between two heartbeats.
        """
        simulated = not self._config.gserver.traits.computes
        on_cores = self._on_cpu and self._told and not simulated
        spending = (PROCESSOR_SECONDS, CHILDREN_SECONDS) if on_cores else ("busy_seconds_total",)
        found = []
        for process in self._records.of_role("gserver"):
            tokens, slots, busy, prompts, steps = (
                _increments(process, f"{name}_total")
                for name in ("tokens_generated", "slot_seconds", "busy_seconds", "prompt_tokens", "decode_steps")
            )
            inside = (process.times[:-1] >= self._begin) & (process.times[1:] <= self._end)
            there = inside & (np.minimum(np.minimum(tokens, slots), busy) > 0)
            steps = np.where(steps > 0, steps, tokens * busy / np.where(slots > 0, slots, 1.0))
            spent = sum((_increments(process, counter) for counter in spending), np.zeros(len(tokens)))
            found.append(np.column_stack([spent, steps, tokens, prompts])[there])
        table = np.concatenate([np.empty((0, 4)), *found])
        if not len(table):
            raise ConfigError(
                f"{self._records.config.run.name if self._records.config else 'the run'}: its gservers made no tokens "
                "between two heartbeats of timeline.jsonl; make a longer run"
            )
        if simulated:  # each request has its own pace, independent of other requests
            return float(table[:, 0].sum() / table[:, 1].sum()), 0.0, 0.0
        step, request, prompt = fit(table[:, 1:], table[:, 0])
        return step, request, prompt

    def _prompt_tokens(self) -> float:
        """Return the mean number of tokens of a prompt."""
        requests = self._counted("gserver", "requests_total")
        computed = self._counted("gserver", "prompt_tokens_total")
        cached = self._counted("gserver", "prompt_tokens_cached_total")
        if not requests:
            self._notes.append("the gservers do not report the lengths of prompts, which count as free")
            return 0.0
        return (computed + cached) / requests

    def _counted(self, role: str, counter: str) -> float:
        """Return the growth of `counter` in all processes of `role` from the first step to the last."""
        return self._added(role, lambda process: _increments(process, counter))

    def _added(self, role: str, between: Callable[[Process], Column]) -> float:
        """Return the sum of `between`, one value for each two consecutive heartbeats, from the first step to the last,
        in all processes of `role`."""
        total = 0.0
        for process in self._records.of_role(role):
            reached = np.concatenate([[0.0], np.cumsum(between(process))])
            total += float(np.diff(np.interp([self._begin, self._end], process.times, reached))[0])
        return total

    def _used(self, role: str) -> float:
        """Return the processor seconds of all processes of `role` and of their children."""
        return self._counted(role, PROCESSOR_SECONDS) + self._counted(role, CHILDREN_SECONDS)

    def _sum(self, metric: str) -> float:
        return sum(step.metrics.get(metric, 0.0) for step in self._steps)

    def _mean(self, metric: str) -> float:
        return self._sum(metric) / len(self._steps)


def _increments(process: Process, counter: str) -> Column:
    """Return the growth of a counter between each two consecutive heartbeats.

    If the process was restarted in between, the counter starts at 0 again and the growth counts as 0: the process was
    down for some of the time and then loaded its state.
    """
    return np.where(process.began_anew, 0.0, np.diff(process.grown(counter)))


def fit(terms: NDArray[np.float64], sums: NDArray[np.float64]) -> tuple[float, ...]:
    """Return non-negative weights for `terms`, [rows, n], whose weighted sum is closest to `sums`, [rows].

    Closest in the sum of squares. Every subset of terms is fitted without constraints, and the best fit with
    non-negative weights is returned: this is the solution, since the problem is convex, and cheap, since n is small.
    Terms that are 0 in all rows have weight 0.
    """
    n = terms.shape[1]
    best, best_error = np.zeros(n), math.inf
    scale = np.abs(terms).max(axis=0)
    for count in range(1, n + 1):
        for chosen in itertools.combinations(np.flatnonzero(scale), count):
            part = terms[:, chosen] / scale[list(chosen)]
            weights, *_ = np.linalg.lstsq(part, sums, rcond=None)
            error = float(((part @ weights - sums) ** 2).sum())
            if (weights >= 0).all() and error < best_error:
                best, best_error = np.zeros(n), error
                best[list(chosen)] = weights / scale[list(chosen)]
    return tuple(float(weight) for weight in best)


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _tail(file: Path) -> str:
    return file.read_text(errors="replace")[-2000:].strip()
