"""The run so far, as its folder shows it: one model for the display, the page, the report, the trace and the planner.

`RunView` owns the records that were read from one folder, and the position in each file; `refresh` reads new ones.
Invariant: it only reads, and no content of the folder is an error. An unfinished line and a record of another version
are left out, and a file that was removed, thinned out or rewound is read again from its beginning.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.config import CONFIG_FILE, Config, as_known
from streamrl.errors import UNDECODABLE, ConfigError
from streamrl.records import lineage as lineages
from streamrl.records.collapse import HEALTHY
from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport
from streamrl.records.files import Lines
from streamrl.records.health import ENOUGH, WINDOW, RunFigures
from streamrl.records.metrics import FINAL_FILE, METRICS_FILE, Final, StepFigures
from streamrl.records.table import Column, Table, growth
from streamrl.records.timeline import (
    PROCESSOR_SECONDS,
    TIMELINE_FILE,
    FrequentFailure,
    HeartbeatEntry,
    PublicationEntry,
    TimelineEntry,
)

if TYPE_CHECKING:
    from streamrl.records.rollouts import Rollouts

log = logging.getLogger(__name__)

LIVE_SECONDS = 30.0
"""A run without an ending that has written nothing for this many seconds is not live."""
SILENT_BEATS = 8.0
"""A process that misses this many usual heartbeats in a row counts as away during the gap."""
ROLE_ORDER = ("gserver", "rollout", "controller", "model_worker")
"""Order of the processes where all are shown; other roles follow."""

LEDGER = ("ledger_room", "groups_running", "groups_returned", "groups_untrained", "admissions_waiting")
"""Figures of the controller's heartbeats that are shown for each step."""

RunState = Literal["running", "finished", "failed", "stopped", "silent", "empty", "gone"]


class Process:
    """The heartbeats of one process of a run, in order of time; at least one."""

    def __init__(self, role: str, index: int) -> None:
        self.role = role
        self.index = index
        self.stats = Table()
        """One row for each heartbeat, with its `time`."""
        self.waits: list[str] = []
        """The wait that each heartbeat reported; empty: none."""
        self.failure: FrequentFailure | None = None
        """The last failure that a heartbeat reported."""

    def extend(self, beats: Sequence[HeartbeatEntry]) -> None:
        """Append heartbeats."""
        self.stats.extend([beat.stats for beat in beats], time=[beat.time for beat in beats])
        self.waits.extend(beat.waiting_for for beat in beats)
        self.failure = next((beat.failure for beat in reversed(beats) if beat.failure), self.failure)

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def times(self) -> Column:
        """The time of each heartbeat, in seconds since the epoch."""
        return self.stats.column("time")

    def grown(self, counter: str) -> Column:
        """Return the growth of `counter` from the start to each heartbeat, over all starts of the process."""
        return growth(self.stats.column(counter))

    def total(self, counter: str) -> float:
        """Return the growth of `counter` over all starts of the process."""
        return float(self.grown(counter)[-1])

    @property
    def began_anew(self) -> NDArray[np.bool_]:
        """Whether the process or the whole run was restarted between each heartbeat and the next."""
        return np.diff(self.stats.column(PROCESSOR_SECONDS)) < 0  # False for NaN: older versions do not record it

    @property
    def longest_pause(self) -> float:
        """Seconds without a heartbeat after which the process counts as away."""
        gaps = np.diff(self.times)
        return SILENT_BEATS * max(1.0, float(np.median(gaps))) if len(gaps) else float("inf")

    @property
    def restarts(self) -> int:
        """Number of restarts that the heartbeats show."""
        return int(self.began_anew.sum())

    @property
    def last(self) -> dict[str, float]:
        """The figures of the last heartbeat."""
        found = {name: float(self.stats.column(name)[-1]) for name in self.stats.names if name != "time"}
        return {name: value for name, value in found.items() if value == value}


class RunView:
    """One run's folder. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = os.path.basename(os.path.abspath(folder))  # also for "."
        self._step_lines: Lines[StepFigures] = Lines(folder / METRICS_FILE, StepFigures)
        self._evaluation_lines: Lines[EvaluationReport] = Lines(folder / EVALUATIONS_FILE, EvaluationReport)
        self._timeline_lines: Lines[TimelineEntry] = Lines(folder / TIMELINE_FILE, TimelineEntry)
        self._evaluations: dict[int, EvaluationReport] = {}
        self._clear_steps()
        self._clear_timeline()
        self._final_stamp = 0
        self._settings: Mapping[str, Any] = {}
        self._settings_stamp = 0
        self._gone = False
        self._rollouts: Rollouts | None = None
        self.final: Final | None = None
        """How the run ended; None: it did not come to its end."""

    def _clear_steps(self) -> None:
        self._table = Table()
        """One row for each line of the file: its figures, `step` and `time`."""
        self._lines: list[StepFigures] = []
        self._ordered: list[StepFigures] | None = []
        """The cached value of `steps`."""

    def _clear_timeline(self) -> None:
        self.processes: dict[str, Process] = {}
        """`role/index` → its heartbeats."""
        self.publications: list[PublicationEntry] = []
        """Weight updates in order of time."""
        self._last_heartbeat = 0.0

    # --- reading ---

    def refresh(self) -> bool:
        """Read new records; return whether there were any."""
        gone = not os.path.isdir(self.folder)  # Path.is_dir would raise if a file server has lost the folder
        changed = gone != self._gone
        self._gone = gone
        changed |= self._rollouts is not None and self._rollouts.refresh()
        return self._read_steps() | self._read_evaluations() | self._read_timeline() | self._read_final() | changed

    def add_step(self, step: StepFigures) -> None:
        """Add a step that was reported in another way than by the folder, unless it is known."""
        if not self.steps or step.step > self.steps[-1].step:
            self._append([step])

    def _append(self, steps: Sequence[StepFigures]) -> None:
        self._table.extend(
            [step.metrics for step in steps], step=[step.step for step in steps], time=[step.time for step in steps]
        )
        self._lines += steps
        self._ordered = None

    def _read_steps(self) -> bool:
        anew, steps = self._step_lines.new()
        if anew:
            self._clear_steps()
        self._append(steps)
        return anew or bool(steps)

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
        for of_process in beats.values():
            self.add_heartbeats(of_process)
        return anew or bool(entries)

    def add_heartbeats(self, beats: Sequence[HeartbeatEntry]) -> None:
        """Add heartbeats of one process, later ones than those that are known."""
        process = Process(beats[0].role, beats[0].index)
        self.processes.setdefault(process.name, process).extend(beats)
        self._last_heartbeat = max(self._last_heartbeat, beats[-1].time)

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

    @property
    def unreadable(self) -> int:
        """Number of lines that could not be read and were left out."""
        return sum(lines.unreadable for lines in (self._step_lines, self._evaluation_lines, self._timeline_lines))

    # --- contents ---

    @property
    def _rows(self) -> NDArray[np.intp]:
        """Rows of the table in the order of their steps; of a step that was made twice, the later row."""
        numbers = self._table.column("step")
        if (np.diff(numbers) > 0).all():
            return np.arange(len(numbers))
        _, last = np.unique(numbers[::-1], return_index=True)
        return np.asarray(len(numbers) - 1 - last)

    @property
    def steps(self) -> list[StepFigures]:
        """In order; of a step that was reported twice, the last report."""
        if self._ordered is None:
            self._ordered = [self._lines[row] for row in self._rows.tolist()]
        return self._ordered

    def values(self, metric: str) -> list[float]:
        """Return one value for each step that has `metric`, in the order of the steps."""
        column = self._table.column(metric)[self._rows]
        found: list[float] = column[~np.isnan(column)].tolist()
        return found

    @property
    def evaluations(self) -> list[EvaluationReport]:
        """By policy version; of a version that was evaluated twice, the last evaluation."""
        return [self._evaluations[version] for version in sorted(self._evaluations)]

    def of_role(self, role: str) -> list[Process]:
        """Return the processes of `role`, by index."""
        return sorted((p for p in self.processes.values() if p.role == role), key=lambda process: process.index)

    def ordered_processes(self) -> list[Process]:
        """Return all processes by role and index."""
        places = {role: place for place, role in enumerate(ROLE_ORDER)}
        return sorted(self.processes.values(), key=lambda p: (places.get(p.role, len(places)), p.role, p.index))

    def counted(self, role: str, counter: str) -> float:
        """Return the growth of `counter` in all processes of `role`, over all their starts."""
        return sum(process.total(counter) for process in self.of_role(role))

    @property
    def lineages(self) -> list[lineages.Lineage]:
        """Beginnings of the run after its first."""
        return lineages.read(self.folder)

    @property
    def rollouts(self) -> Rollouts:
        """The kept responses. They are read at the first access, and followed from then on. Raises `DataError` for
        rollouts of an earlier version."""
        if self._rollouts is None:
            from streamrl.records.rollouts import Rollouts  # pyarrow, which most viewers do not need

            self._rollouts = Rollouts(self.folder)
        return self._rollouts

    @property
    def rollouts_read(self) -> int:
        """Number of responses that have been read; 0 until `rollouts` is accessed."""
        return len(self._rollouts) if self._rollouts is not None else 0

    def config_tree(self) -> dict[str, Any]:
        """Return the resolved configuration as plain dictionaries. Raises `ConfigError` if it cannot be read."""
        file = self.folder / CONFIG_FILE
        try:
            return tomllib.loads(file.read_text())
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from error

    @property
    def settings(self) -> Mapping[str, Any]:
        """The resolved configuration, from its last successful reading; empty if there was none. A resumed run writes
        it again."""
        try:
            stamp = (self.folder / CONFIG_FILE).stat().st_mtime_ns
            if stamp != self._settings_stamp:
                self._settings, self._settings_stamp = self.config_tree(), stamp
        except (OSError, ConfigError) as error:
            log.debug("the configuration stays as it was read last: %s", error)
        return self._settings

    @property
    def config(self) -> Config | None:
        """The configuration, without keys of other versions; None if it cannot be read."""
        return as_known(self.settings)

    # --- time ---

    @property
    def begin(self) -> float:
        """Time of the first record: of a step's begin, a weight update or a heartbeat; 0: unknown."""
        times = [float(process.times[0]) for process in self.processes.values()]
        times += [update.begin for update in self.publications[:1]]
        times += [self.trained_between[0]] if self.steps else []
        return min(times, default=0.0)

    @property
    def end(self) -> float:
        """Time of the last record."""
        last = float(np.nanmax(self._table.column("time"))) if len(self._table) else 0.0
        return max(last, self._last_heartbeat)

    @property
    def trained_between(self) -> tuple[float, float]:
        """Begin of the first step and end of the last one, in seconds since the epoch; (0, 0) without steps."""
        return (_begin_of(self.steps[0]), self.steps[-1].time) if self.steps else (0.0, 0.0)

    def spans(self) -> dict[str, list[tuple[float, float]]]:
        """Return the trainer's activities: name → (begin, end), in seconds since the epoch."""
        found: dict[str, list[tuple[float, float]]] = {}
        for step in self.steps:
            for name, begin, end in step.spans:
                found.setdefault(name, []).append((begin, end))
        return found

    def state(self, *, now: float | None = None) -> tuple[RunState, str]:
        """Return the state of the run, and the reason in words; `now`: seconds since the epoch."""
        if self._gone:
            return "gone", f"{self.folder} is not there any more; records that were read before are still shown"
        now = time.time() if now is None else now
        last = self.end
        live = now - last < LIVE_SECONDS
        if self.final is not None and not (live and last * 1e9 > self._final_stamp + 5e9):
            ending, message = self.final.ending
            if ending == "failed":
                return "failed", message
            return ("finished", message) if ending == "finished" else ("stopped", message or "stopped before its end")
        if live:
            return "running", ""
        if not last:
            return "empty", "nothing was written yet"
        return "silent", "its records end without a reason: it was killed, or its machine is gone"

    # --- figures ---

    def figures(self) -> RunFigures:
        """Return the figures that the health of the run is judged by: its latest ones."""
        steps = self.steps
        recent = steps[-WINDOW:]
        state, message = self.state()
        free, size = self._disk()
        return RunFigures(
            steps=[step.metrics for step in recent],
            first=[step.metrics for step in steps[:ENOUGH]],
            best_reward=max(self.values("reward_mean"), default=None),
            health=steps[-1].health if steps else HEALTHY,
            response_lengths=steps[-1].response_lengths if steps else (),
            evaluations=self.evaluations,
            stats={process.name: process.last for process in self.processes.values()},
            failures={name: process.failure for name, process in self.processes.items() if process.failure is not None},
            generation_busy=self.generation_busy(since=_begin_of(recent[0]) if recent else 0.0),
            restarts=self._restarts(),
            lineages=self.lineages,
            failed_updates=sum(not update.done for update in self.publications),
            config=self.config,
            state=state,
            message=message,
            disk_free=free,
            disk_bytes=size,
        )

    def _disk(self) -> tuple[int | None, int | None]:
        """Return the free bytes and the size of the run's disk; a finished run needs no more room."""
        try:
            disk = shutil.disk_usage(self.folder) if self.final is None else None
        except OSError as error:
            log.debug("the free space of the run's disk is unknown: %s", error)
            disk = None
        return (disk.free, disk.total) if disk is not None else (None, None)

    def _restarts(self) -> dict[str, int]:
        """Return process → number of its restarts, without those in which the whole run was resumed."""
        resumed = np.array([lineage.time for lineage in self.lineages if not lineage.cause])
        found = {}
        for name, process in self.processes.items():
            rows = np.flatnonzero(process.began_anew)
            before, after = process.times[rows, None], process.times[rows + 1, None]
            of_the_run = ((before <= resumed) & (resumed <= after)).any(axis=1)
            if count := int((~of_the_run).sum()):
                found[name] = count
        return found

    def generation_busy(self, *, since: float = 0.0) -> float | None:
        """Return the share of the gservers' time in which they computed; `since`: seconds since the epoch.

        The interval between the heartbeats before and after a restart, of a gserver or of the whole run, is left out,
        because the gserver was down in it.
        """
        busy = seconds = 0.0
        for process in self.of_role("gserver"):
            there = (process.times[:-1] >= since) & ~process.began_anew
            busy += float(np.diff(process.grown("busy_seconds_total"))[there].sum())
            seconds += float(np.diff(process.times)[there].sum())
        return busy / seconds if seconds > 0 else None

    def generated_per_second(self) -> float | None:
        """Return the tokens per second of all gservers together, from the first step to the last; None: not enough
        records.

        Tokens and time are counted between two heartbeats of a gserver that ran throughout. So work that was lost when
        the run was killed is in both, and the time in which it was down in neither.
        """
        begin, end = self.trained_between
        tokens, covered = 0.0, [np.empty((0, 2))]
        for process in self.of_role("gserver"):
            times = process.times
            made = np.diff(process.stats.column("tokens_generated_total"))
            there = (made >= 0) & ~process.began_anew & (times[:-1] >= begin) & (times[1:] <= end)
            tokens += float(made[there].sum())
            covered.append(np.column_stack([times[:-1], times[1:]])[there])
        spans = np.concatenate(covered)
        begins, ends = spans[np.argsort(spans[:, 0])].T
        reached = np.maximum.accumulate(ends)
        before = np.append(-np.inf, reached[:-1])  # the seconds of gservers that work at the same time count once
        seconds = float(np.maximum(reached - np.maximum(begins, before), 0.0).sum()) if len(reached) else 0.0
        return tokens / seconds if seconds else None

    def columns(self) -> dict[str, Column]:
        """Return all figures of the steps by name, in the order of the steps, and figures derived from the timeline.

        Times are in seconds since `begin`. Added for each step are: `generated_per_second`, tokens of all gservers;
        `generation_busy`, `generation_paused` and `generation_idle`, shares of their time; `trainer_wait`, share of the
        step; `token_age_mean` and `token_age_max`, in versions; `masked_share` of the sampled tokens; and the
        controller's counts of its ledger at the end of the step (`LEDGER`).
        """
        order, begin = self._rows, self.begin
        found = {name: self._table.column(name)[order] for name in self._table.names}
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
        ages = [step.token_ages for step in self.steps]
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
        for process in self.of_role("gserver"):
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


def _begin_of(step: StepFigures) -> float:
    return min((begin for _, begin, _ in step.spans), default=step.time - step.metrics.get("step_seconds", 0.0))


def _number(column: Column | None, row: int) -> float:
    """Return the value in `row`; 0 if it is missing."""
    return float(column[row]) if column is not None and np.isfinite(column[row]) else 0.0


def read_run(folder: Path) -> RunView:
    """Return the run in `folder` with all records that are there now; missing ones are empty or None."""
    view = RunView(folder)
    while view.refresh():
        pass
    if view.unreadable:
        log.warning("%s: %d lines of its records cannot be read and are left out", folder, view.unreadable)
    return view


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
