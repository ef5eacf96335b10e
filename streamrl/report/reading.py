"""Read a run's folder (`records/` has the formats), and compute figures over many steps or heartbeats.

Tolerant by purpose: a crashed run is read up to its crash. Unreadable parts are left out with a warning.
"""

from __future__ import annotations

import logging
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import UNDECODABLE, ConfigError
from streamrl.records import lineage as lineages
from streamrl.records.collapse import HEALTHY
from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport
from streamrl.records.files import read_records
from streamrl.records.health import ENOUGH, WINDOW, RunFigures
from streamrl.records.metrics import FINAL_FILE, METRICS_FILE, Final, StepReport
from streamrl.records.table import Column, growth, restarts
from streamrl.records.timeline import (
    PROCESSOR_SECONDS,
    TIMELINE_FILE,
    HeartbeatEntry,
    PublicationEntry,
    TimelineEntry,
)
from streamrl.transport.control import Status

log = logging.getLogger(__name__)


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """All readable records of a run's folder."""

    folder: Path
    config: Config | None
    steps: list[StepReport]
    """In order; of a step that was reported twice, the last report."""
    evaluations: list[EvaluationReport]
    """By policy version; of a version that was evaluated twice, the last report."""
    heartbeats: dict[str, list[HeartbeatEntry]]
    """`role/index` → its heartbeats in order of time."""
    publications: list[PublicationEntry]
    """Weight updates in order of time."""
    final: Final | None
    """None: the run did not come to its end."""
    status: Status | None
    """The controller's last status, from `final`."""


def read_run(run_dir: Path) -> Records:
    """Read the records in `run_dir`; missing ones are empty or None."""
    steps = {step.step: step for step in read_records(run_dir / METRICS_FILE, StepReport)}
    evaluations = {e.policy_version: e for e in read_records(run_dir / EVALUATIONS_FILE, EvaluationReport)}
    entries: list[TimelineEntry] = read_records(run_dir / TIMELINE_FILE, TimelineEntry)  # type: ignore[arg-type]
    heartbeats: dict[str, list[HeartbeatEntry]] = {}
    publications = []
    for entry in sorted(entries, key=lambda entry: entry.time):
        if isinstance(entry, PublicationEntry):
            publications.append(entry)
        else:
            heartbeats.setdefault(f"{entry.role}/{entry.index}", []).append(entry)
    final, status = _final(run_dir / FINAL_FILE)
    return Records(
        folder=run_dir,
        config=_config(run_dir / "config.toml"),
        steps=[steps[number] for number in sorted(steps)],
        evaluations=[evaluations[version] for version in sorted(evaluations)],
        heartbeats=heartbeats,
        publications=publications,
        final=final,
        status=status,
    )


def _final(file: Path) -> tuple[Final | None, Status | None]:
    final: Final | None = None
    try:
        final = msgspec.json.decode(file.read_bytes(), type=Final)
        return final, None if final.status is None else msgspec.convert(final.status, Status, str_keys=True)
    except FileNotFoundError:
        return None, None
    except UNDECODABLE as error:
        what = "the controller's figures in it" if final is not None else "it"  # another version has others
        log.warning("%s: %s cannot be read: %s", file, what, error)
        return final, None


def _config(file: Path) -> Config | None:
    if not file.exists():
        return None
    try:
        return configuration.load(file)
    except ConfigError as error:
        try:
            known = configuration.as_known(tomllib.loads(file.read_text()))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
            known = None
        what = "left out" if known is None else "taken as far as this version knows it"
        log.warning("the run's configuration is %s: %s", what, error)
        return known


def figures(records: Records) -> RunFigures:
    """Return the figures that the health of a run is judged by: its latest ones."""
    steps = records.steps
    state, message = records.final.ending if records.final is not None else ("", "")
    recent = steps[-WINDOW:]
    free, size = None, None
    if records.final is None and records.folder.is_dir():  # a finished run needs no more room
        disk = shutil.disk_usage(records.folder)
        free, size = disk.free, disk.total
    return RunFigures(
        steps=[step.metrics for step in recent],
        first=[step.metrics for step in steps[:ENOUGH]],
        best_reward=max(values(steps, "reward_mean"), default=None),
        health=steps[-1].health if steps else HEALTHY,
        response_lengths=steps[-1].response_lengths if steps else (),
        evaluations=records.evaluations,
        stats={process: entries[-1].stats for process, entries in records.heartbeats.items()},
        failures={
            process: failure
            for process, entries in records.heartbeats.items()
            if (failure := next((entry.failure for entry in reversed(entries) if entry.failure), None))
        },
        generation_busy=generation_busy(records, since=time_range(recent)[0]),
        restarts={
            process: count
            for process, entries in records.heartbeats.items()
            if (count := restarts(_column(entries, PROCESSOR_SECONDS)))
        },
        lineages=lineages.read(records.folder),
        failed_updates=sum(not update.done for update in records.publications),
        config=records.config,
        state=state,
        message=message,
        disk_free=free,
        disk_bytes=size,
    )


def generation_busy(records: Records, *, since: float = 0.0) -> float | None:
    """Return the share of the gservers' time in which they computed; `since`: seconds since the epoch.

    The interval between the heartbeats before and after a restart, of a gserver or of the whole run, is left out,
    because the gserver was down in it.
    """
    busy = seconds = 0.0
    for process, entries in records.heartbeats.items():
        recent = [entry for entry in entries if entry.time >= since]
        if process.startswith("gserver/") and len(recent) > 1:
            there = ~(np.diff(_column(recent, PROCESSOR_SECONDS)) < 0)  # NaN: older versions do not record it
            busy += float(np.diff(grown(recent, "busy_seconds_total"))[there].sum())
            seconds += float(np.diff([entry.time for entry in recent])[there].sum())
    return busy / seconds if seconds > 0 else None


def generated_per_second(records: Records) -> float | None:
    """Return the tokens per second of all gservers together, from the first step to the last; None: not enough records.

    Tokens and time are counted between two heartbeats of a gserver that ran throughout. So work that was lost when the
    run was killed is in both, and the time in which it was down in neither.
    """
    begin, end = time_range(records.steps)
    tokens, covered = 0.0, [np.empty((0, 2))]
    for process, entries in records.heartbeats.items():
        if process.startswith("gserver/"):
            times = np.array([entry.time for entry in entries])
            made = np.diff(_column(entries, "tokens_generated_total"))
            began_anew = np.diff(_column(entries, PROCESSOR_SECONDS)) < 0  # NaN: older versions do not record it
            there = (made >= 0) & ~began_anew & (times[:-1] >= begin) & (times[1:] <= end)
            tokens += float(made[there].sum())
            covered.append(np.column_stack([times[:-1], times[1:]])[there])
    spans = np.concatenate(covered)
    begins, ends = spans[np.argsort(spans[:, 0])].T
    reached = np.maximum.accumulate(ends)
    before = np.append(-np.inf, reached[:-1])  # the seconds of gservers that work at the same time count once
    seconds = float(np.maximum(reached - np.maximum(begins, before), 0.0).sum()) if len(reached) else 0.0
    return tokens / seconds if seconds else None


def values(steps: Sequence[StepReport], metric: str) -> list[float]:
    """Return one value for each step that has `metric`."""
    return [step.metrics[metric] for step in steps if metric in step.metrics]


def time_range(steps: Sequence[StepReport]) -> tuple[float, float]:
    """Return when the first step began and the last ended, in seconds since the epoch; (0, 0) without steps."""
    if not steps:
        return 0.0, 0.0
    first = steps[0]
    begin = min((begin for _, begin, _ in first.spans), default=first.time - first.metrics.get("step_seconds", 0.0))
    return begin, steps[-1].time


def total_ages(steps: Sequence[StepReport]) -> dict[int, int]:
    """Return age in versions → tokens that entered the loss, over all steps."""
    ages: dict[int, int] = {}
    for step in steps:
        for age, count in step.token_ages.items():
            if count:
                ages[age] = ages.get(age, 0) + count
    return ages


def grown(entries: Sequence[HeartbeatEntry], counter: str) -> Column:
    """Return the growth of a process's `counter` until each heartbeat, over all its starts."""
    return growth(_column(entries, counter))


def total(entries: Sequence[HeartbeatEntry], counter: str) -> float:
    """Return the total growth of a process's `counter`, over all its starts."""
    return float(grown(entries, counter)[-1]) if entries else 0.0


def _column(entries: Sequence[HeartbeatEntry], counter: str) -> Column:
    return np.array([entry.stats.get(counter, np.nan) for entry in entries])
