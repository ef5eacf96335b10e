"""A run's folder, followed while it grows.

`Run` owns the records that were read from one folder, and the position in each file. Invariant: it only reads, and no
content of the folder ends the page. An unfinished line and a record of another version are left out, and a file that
was removed or thinned out is read again.
"""

from __future__ import annotations

import logging
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from streamrl.errors import UNDECODABLE, ConfigError
from streamrl.records.collapse import HEALTHY, Health
from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport
from streamrl.records.files import Lines
from streamrl.records.metrics import FINAL_FILE, METRICS_FILE, Final
from streamrl.records.rollouts import Rollouts
from streamrl.records.table import Column, Table, growth, restarts
from streamrl.records.timeline import (
    PROCESSOR_SECONDS,
    TIMELINE_FILE,
    FrequentFailure,
    HeartbeatEntry,
    PublicationEntry,
    TimelineEntry,
)

log = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
LIVE_SECONDS = 30.0
"""A run without an ending that has written nothing for this many seconds is not live."""

LEDGER = ("ledger_room", "groups_running", "groups_returned", "groups_untrained", "admissions_waiting")
"""Figures of the controller's heartbeats that are shown for each step."""

RunState = Literal["running", "finished", "failed", "stopped", "silent", "empty", "gone"]


class StepLine(msgspec.Struct, frozen=True):
    """The part of a `StepReport` that the page needs; the rest of the line is not decoded."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # a column of 64-bit floats holds no larger integers exactly
    time: float
    metrics: dict[str, float]
    token_ages: dict[int, int] = {}
    masked_ages: dict[int, int] = {}
    response_lengths: list[list[int]] = []
    spans: list[tuple[str, float, float]] = []
    health: Health = HEALTHY


class Process:
    """The heartbeats of one process of a run."""

    def __init__(self, role: str, index: int) -> None:
        self.role = role
        self.index = index
        self.stats = Table()
        """One row for each heartbeat, with its `time`."""
        self.waits: list[str] = []
        """The wait that each heartbeat reported; empty: none."""
        self.failure: FrequentFailure | None = None
        """The last failure that a heartbeat reported."""

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def times(self) -> Column:
        """The time of each heartbeat, in seconds since the epoch."""
        return self.stats.column("time")

    def grown(self, counter: str) -> Column:
        """Return the growth of `counter` from the start to each heartbeat."""
        return growth(self.stats.column(counter))

    @property
    def began_anew(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether the process or the whole run was restarted between each heartbeat and the next."""
        return np.diff(self.stats.column(PROCESSOR_SECONDS)) < 0

    @property
    def restarts(self) -> int:
        """Number of restarts that the heartbeats show."""
        return restarts(self.stats.column(PROCESSOR_SECONDS))


class Run:
    """One run's folder. `refresh` reads new records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = os.path.basename(os.path.abspath(folder))  # also for "."
        self._step_lines: Lines[StepLine] = Lines(folder / METRICS_FILE, StepLine)
        self._evaluation_lines: Lines[EvaluationReport] = Lines(folder / EVALUATIONS_FILE, EvaluationReport)
        self._timeline_lines: Lines[TimelineEntry] = Lines(folder / TIMELINE_FILE, TimelineEntry)
        self._clear_steps()
        self._clear_timeline()
        self._evaluations: dict[int, EvaluationReport] = {}
        self._final_stamp = 0
        self._settings: Mapping[str, Any] = {}
        self._settings_stamp = 0
        self._gone = False
        self._rollouts: Rollouts | None = None
        self.final: Final | None = None
        self.generation = 0
        """Number of times that earlier results became invalid."""

    def _clear_steps(self) -> None:
        self.steps = Table()
        """One row for each step: its figures, `step` and `time`."""
        self._ages: list[dict[int, int]] = []
        self._masked_ages: list[dict[int, int]] = []
        self.spans: dict[str, list[tuple[float, float]]] = {}
        """The trainer's activities: name → (begin, end), in seconds since the epoch."""
        self.health = HEALTHY
        self.response_lengths: list[list[int]] = []
        """Sampled tokens of each sibling of the last step's first groups."""

    def _clear_timeline(self) -> None:
        self.processes: dict[str, Process] = {}
        self.publications: list[PublicationEntry] = []
        self._last_heard = 0.0

    def refresh(self) -> bool:
        """Read new records; return whether there were any."""
        gone = not os.path.isdir(self.folder)  # Path.is_dir would raise if a file server has lost the folder
        changed = gone != self._gone
        self._gone = gone
        changed |= self._rollouts is not None and self._rollouts.refresh()
        return self._read_steps() | self._read_evaluations() | self._read_timeline() | self._read_final() | changed

    def _read_steps(self) -> bool:
        anew, steps = self._step_lines.new()
        known = self.steps.column("step")
        if anew or (steps and len(known) and steps[0].step <= known[-1]):  # a resumed run repeats steps
            self.generation += 1
        if anew:
            self._clear_steps()
        if not steps:
            return anew
        self.steps.extend(
            [step.metrics for step in steps], step=[step.step for step in steps], time=[step.time for step in steps]
        )
        for step in steps:
            self._ages.append(step.token_ages)
            self._masked_ages.append(step.masked_ages)
            for name, begin, end in step.spans:
                self.spans.setdefault(name, []).append((begin, end))
        self.health, self.response_lengths = steps[-1].health, steps[-1].response_lengths
        return True

    def _read_evaluations(self) -> bool:
        anew, reports = self._evaluation_lines.new()
        if anew:
            self._evaluations.clear()
        self._evaluations.update((report.policy_version, report) for report in reports)
        return anew or bool(reports)

    def _read_timeline(self) -> bool:
        anew, entries = self._timeline_lines.new()
        if anew:
            self._clear_timeline()
        beats: dict[str, list[HeartbeatEntry]] = {}
        for entry in entries:
            if isinstance(entry, PublicationEntry):
                self.publications.append(entry)
            else:
                beats.setdefault(f"{entry.role}/{entry.index}", []).append(entry)
        for name, of_process in beats.items():
            process = self.processes.setdefault(name, Process(of_process[0].role, of_process[0].index))
            process.stats.extend([beat.stats for beat in of_process], time=[beat.time for beat in of_process])
            process.waits.extend(beat.waiting_for for beat in of_process)
            process.failure = next((beat.failure for beat in reversed(of_process) if beat.failure), process.failure)
            self._last_heard = max(self._last_heard, of_process[-1].time)
        return anew or bool(entries)

    def _read_final(self) -> bool:
        file = self.folder / FINAL_FILE
        try:
            stamp = file.stat().st_mtime_ns
            if stamp == self._final_stamp:
                return False
            self._final_stamp = stamp
            self.final = msgspec.json.decode(file.read_bytes(), type=Final)
        except OSError:
            was, self.final, self._final_stamp = self.final, None, 0
            return was is not None
        except UNDECODABLE as error:
            log.warning("%s cannot be read and is left out: %s", file, error)
            return False
        return True

    # --- contents ---

    @property
    def order(self) -> np.ndarray[Any, np.dtype[np.intp]]:
        """Rows of `steps` in the order of their steps; of a step that was made twice, the later row."""
        numbers = self.steps.column("step")
        if (np.diff(numbers) > 0).all():
            return np.arange(len(numbers))
        _, last = np.unique(numbers[::-1], return_index=True)
        return np.asarray(len(numbers) - 1 - last)

    @property
    def evaluations(self) -> list[EvaluationReport]:
        """Evaluations by policy version; of a version that was evaluated twice, the later evaluation."""
        return [self._evaluations[version] for version in sorted(self._evaluations)]

    @property
    def ages(self) -> list[dict[int, int]]:
        """Age in versions → tokens that entered the loss, for each row of `order`."""
        return [self._ages[row] for row in self.order]

    @property
    def masked_ages(self) -> list[dict[int, int]]:
        """Age in versions → sampled tokens that were too old for the loss, for each row of `order`."""
        return [self._masked_ages[row] for row in self.order]

    @property
    def begin(self) -> float:
        """Begin of the first step, or time of the first heartbeat if that is earlier; 0: unknown."""
        times = [float(p.times[0]) for p in self.processes.values() if len(p.times)]
        if len(self.steps):
            first = float(self.steps.column("time")[0])
            seconds = float(self.steps.column("step_seconds")[0])
            times.append(first - (seconds if np.isfinite(seconds) else 0.0))
        return min(times, default=0.0)

    @property
    def end(self) -> float:
        """Time of the last record."""
        last = float(np.nanmax(self.steps.column("time"))) if len(self.steps) else 0.0
        return max(last, self._last_heard)

    def state(self, *, now: float | None = None) -> tuple[RunState, str]:
        """Return the state of the run, and the reason in words; `now`: seconds since the epoch."""
        if self._gone:
            return "gone", f"{self.folder} is not there any more; what was read of it is still shown"
        now = time.time() if now is None else now
        heard = self.end
        live = now - heard < LIVE_SECONDS
        if self.final is not None and not (live and heard * 1e9 > self._final_stamp + 5e9):
            told, message = self.final.ending
            if told == "failed":
                return "failed", message
            return ("finished", message) if told == "finished" else ("stopped", message or "stopped before its end")
        if live:
            return "running", ""
        if not heard:
            return "empty", "nothing was written yet"
        return "silent", "it left no last word: it was killed, or its machine is gone"

    @property
    def unreadable(self) -> int:
        """Number of lines that could not be read and were left out."""
        return sum(lines.unreadable for lines in (self._step_lines, self._evaluation_lines, self._timeline_lines))

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration as plain dictionaries. Raises `ConfigError` if it cannot be read."""
        file = self.folder / CONFIG_FILE
        try:
            return tomllib.loads(file.read_text())
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from error

    @property
    def rollouts(self) -> Rollouts:
        """The kept responses. They are read at the first access, and followed from then on."""
        if self._rollouts is None:
            self._rollouts = Rollouts(self.folder)
        return self._rollouts

    @property
    def rollouts_read(self) -> int:
        """Number of responses that have been read; 0 until `rollouts` is accessed."""
        return len(self._rollouts) if self._rollouts is not None else 0

    @property
    def settings(self) -> Mapping[str, Any]:
        """The resolved configuration, from its last successful reading; empty if there was none. A resumed run writes
        it again."""
        try:
            stamp = (self.folder / CONFIG_FILE).stat().st_mtime_ns
            if stamp != self._settings_stamp:
                self._settings, self._settings_stamp = self.config(), stamp
        except (OSError, ConfigError) as error:
            log.debug("the configuration stays as it was read last: %s", error)
        return self._settings

    def columns(self) -> dict[str, Column]:
        """Return all figures of the steps by name, in the order of the steps, and figures derived from the timeline.

        Times are in seconds since `begin`. Added for each step are: `generated_per_second`, tokens of all gservers;
        `generation_busy`, `generation_paused` and `generation_idle`, shares of their time; `trainer_wait`, share of the
        step; `token_age_mean` and `token_age_max`, in versions; `masked_share` of the sampled tokens; and the
        controller's counts of its ledger at the end of the step (`LEDGER`).
        """
        order, begin = self.order, self.begin
        found = {name: self.steps.column(name)[order] for name in self.steps.names}
        if not len(order):
            return found
        times = found["time"]
        starts = np.concatenate([[times[0] - _number(found.get("step_seconds"), 0)], times[:-1]])
        if "run_seconds" in found:  # these do not include the time between two runs
            starts[1:] = np.clip(np.fmax(starts[1:], times[1:] - np.diff(found["run_seconds"])), None, times[1:])
        found |= self._generation(starts, times) | self._ledger(times)
        if "wait_seconds" in found and "step_seconds" in found:
            with np.errstate(divide="ignore", invalid="ignore"):
                found["trainer_wait"] = np.clip(found["wait_seconds"] / found["step_seconds"], 0.0, 1.0)
        if "tokens_masked" in found and "tokens_trained" in found:
            sampled = found["tokens_masked"] + found["tokens_trained"]
            found["masked_share"] = np.where(sampled > 0, found["tokens_masked"] / np.maximum(sampled, 1.0), 0.0)
        ages = self.ages
        tokens = np.array([sum(step.values()) for step in ages], dtype=float)
        weighted = np.array([sum(age * count for age, count in step.items()) for step in ages], dtype=float)
        found["token_age_mean"] = np.where(tokens > 0, weighted / np.maximum(tokens, 1.0), np.nan)
        found["token_age_max"] = np.array([max((a for a, c in s.items() if c), default=np.nan) for s in ages])
        found["time"] = times - begin
        return found

    def _ledger(self, times: Column) -> dict[str, Column]:
        """Return the figures of the controller's last heartbeat before each of `times`."""
        controller = self.processes.get("controller/0")
        if controller is None or not len(controller.times):
            return {}
        rows = np.searchsorted(controller.times, times, side="right") - 1
        values = {name: controller.stats.column(name) for name in LEDGER if name in controller.stats.names}
        return {name: np.where(rows >= 0, column[np.maximum(rows, 0)], np.nan) for name, column in values.items()}

    def _generation(self, starts: Column, ends: Column) -> dict[str, Column]:
        """Return rates and shares of time of all gservers, for the stretches of time from `starts` to `ends`."""
        seconds = np.maximum(ends - starts, 1e-9)
        tokens, busy, paused, present = (np.zeros(len(ends)) for _ in range(4))
        for process in self.processes.values():
            if process.role != "gserver" or len(process.times) < 2:
                continue
            times = process.times
            present += np.clip(np.minimum(ends, times[-1]) - np.maximum(starts, times[0]), 0.0, None)
            for counter, total in (
                ("tokens_generated_total", tokens),
                ("busy_seconds_total", busy),
                ("pause_seconds_total", paused),
            ):
                grown = process.grown(counter)
                total += np.interp(ends, times, grown) - np.interp(starts, times, grown)
        there = np.where(present > 0, present, np.nan)
        shares = {"busy": np.clip(busy / there, 0.0, 1.0), "paused": np.clip(paused / there, 0.0, 1.0)}
        idle = np.clip(1.0 - shares["busy"] - shares["paused"], 0.0, 1.0)
        return {
            "generated_per_second": np.where(present > 0, tokens / seconds, np.nan),
            "generation_busy": shares["busy"],
            "generation_paused": shares["paused"],
            "generation_idle": idle,
        }


def _number(column: Column | None, row: int) -> float:
    """Return the value in `row`; 0 if it is missing."""
    return float(column[row]) if column is not None and np.isfinite(column[row]) else 0.0


def found_in(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of runs: each of `folders` is the folder of a run, or contains folders of runs.

    Raises `ConfigError` for a folder that is neither.
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; give the folder of a run, for example runs/addition")
        runs = [folder] if is_run(folder) else sorted(child for child in folder.iterdir() if is_run(child))
        if not runs:
            raise ConfigError(
                f"{folder} is no run, and has none in it: there is no {CONFIG_FILE}, {METRICS_FILE} or {TIMELINE_FILE}"
            )
        found += [run for run in runs if run not in found]
    return found


def is_run(folder: Path) -> bool:
    """Return whether a run has written to `folder`; an unreadable folder, such as lost+found, is no run."""
    return any(os.path.isfile(folder / name) for name in (CONFIG_FILE, METRICS_FILE, TIMELINE_FILE))
