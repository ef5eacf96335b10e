"""A run's timeline as a trace file for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The format is Chrome's Trace Event Format, as JSON
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). It has one "process" for the trainer,
one for the weight updates, and one for each process of the run, with tracks for activities and curves for figures.
Times are in microseconds since the run's first record.

Spans of the trainer are exact. The activity of other processes is known from their heartbeats: the state in a heartbeat
holds until the next one.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streamrl.records.timeline import without_figures
from streamrl.records.view import Process, RunView

TRAINER, UPDATES, FIRST_PROCESS = 1, 2, 3
"""Numbers of the trace's processes."""
GAUGES = {
    "controller": ("ledger_room", "groups_running", "groups_untrained", "admissions_waiting", "groups_held"),
    "gserver": ("running", "queued"),
    "rollout": ("groups_running", "requests_in_flight"),
    "model_worker": ("groups_held",),
}
"""Role → figures of its heartbeats that are drawn as curves."""
CURVES = ("reward_mean", "effective_sample_size", "tokens_per_second")
"""Figures of the steps that are drawn as curves."""
GENERATES = 0.05
"""A gserver was generating if it computed for more than this share of the time between two heartbeats."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event, with the format's field names."""

    name: str
    ph: str
    """X: a slice; C: a value of a curve; i: an instant; M: metadata."""
    pid: int
    tid: int = 0
    ts: float | None = None
    """Microseconds."""
    dur: float | None = None
    """Microseconds."""
    cat: str = ""
    s: str = ""
    """Scope of an instant (`ph` = "i"): `p`, all tracks of the process."""
    args: dict[str, Any] = {}


TRACE_FILE = "trace.json.gz"


def write_trace(run: RunView, file: Path) -> int:
    """Write the trace of a run as `file`, compressed if its name ends in `.gz`; return the number of events.

    Raises `OSError` if it cannot be written.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    with gzip.open(file, "wb", compresslevel=4) if file.suffix == ".gz" else file.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for count, event in enumerate(events(run), start=1):
            out.write((b",\n" if count > 1 else b"") + encoder.encode(event))
        out.write(b"\n]}\n")
    return count


def events(run: RunView) -> Iterator[Event]:
    """Yield all events of a run. Slices of one track neither overlap nor go back in time."""
    origin = run.begin
    yield from _named(TRAINER, "trainer", place=0)
    yield from _trainer(run, origin)
    yield from _named(UPDATES, "weight updates", place=1)
    yield from _updates(run, origin)
    yield from _evaluations(run, origin)
    for number, process in enumerate(run.ordered_processes()):
        pid = FIRST_PROCESS + number
        yield from _named(pid, process.name, place=2 + number)
        yield from _process(process, pid=pid, origin=origin)


def _named(pid: int, name: str, *, place: int) -> Iterator[Event]:
    yield Event("process_name", "M", pid, args={"name": name})
    yield Event("process_sort_index", "M", pid, args={"sort_index": place})


def _track(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield Event("thread_name", "M", pid, tid, args={"name": name})
    yield Event("thread_sort_index", "M", pid, tid, args={"sort_index": tid})


def _slices(
    pieces: Iterable[tuple[str, float, float, dict[str, Any]]], *, pid: int, tid: int, origin: float, category: str
) -> Iterator[Event]:
    """Yield `(name, begin, end, args)` as slices of one track; each begins after the end of the one before."""
    reached = 0.0
    for name, begin, end, args in sorted(pieces, key=lambda piece: piece[1]):
        start = max(reached, _microseconds(begin, origin))
        reached = max(start, _microseconds(end, origin))
        yield Event(name, "X", pid, tid, ts=start, dur=round(reached - start, 3), cat=category, args=args)


def _microseconds(time: float, origin: float) -> float:
    return round((time - origin) * 1e6, 3)


def _trainer(run: RunView, origin: float) -> Iterator[Event]:
    by_name: dict[str, list[tuple[str, float, float, dict[str, Any]]]] = {}
    steps: list[tuple[str, float, float, dict[str, Any]]] = []
    for step in run.steps:
        spans = [span for span in step.spans if span[0] != "publish"]
        if spans:
            begin = next((begin for name, begin, _ in spans if name == "wait"), spans[0][1])
            steps.append((f"step {step.step}", begin, step.time, _finite(step.metrics, CURVES)))
        for name, begin, end in spans:
            by_name.setdefault(name, []).append((name, begin, end, {"step": step.step}))
    yield from _track(TRAINER, 1, "steps")
    yield from _slices(steps, pid=TRAINER, tid=1, origin=origin, category="step")
    for tid, (name, pieces) in enumerate(sorted(by_name.items(), key=lambda item: item[0] != "wait"), start=2):
        yield from _track(TRAINER, tid, name)
        yield from _slices(pieces, pid=TRAINER, tid=tid, origin=origin, category="wait" if name == "wait" else "mfc")
    for curve in CURVES:
        for step in run.steps:
            for value in _finite(step.metrics, (curve,)).values():
                yield Event(curve, "C", TRAINER, ts=_microseconds(step.time, origin), args={curve: value})
    state = "healthy"
    for step in run.steps:
        if step.health.state != state:
            state = step.health.state
            name = f"policy {state}"
            args = {"signs": ", ".join(step.health.signs)}
            yield Event(name, "i", TRAINER, ts=_microseconds(step.time, origin), s="p", args=args)


def _updates(run: RunView, origin: float) -> Iterator[Event]:
    made, failed = [], []
    for update in run.publications:
        args: dict[str, Any] = {"pause_seconds": update.pause}
        if update.done:
            made.append((f"v{update.version}", update.begin, update.end, args))
        else:
            failed.append((f"v{update.version} failed", update.begin, update.end, args | {"error": update.error}))
    for tid, name, pieces in ((1, "published", made), (2, "rolled back", failed)):
        if pieces:
            yield from _track(UPDATES, tid, name)
            yield from _slices(pieces, pid=UPDATES, tid=tid, origin=origin, category="publication")


def _evaluations(run: RunView, origin: float) -> Iterator[Event]:
    if run.evaluations:
        yield from _track(UPDATES, 3, "evaluations")
    pieces: list[tuple[str, float, float, dict[str, Any]]] = [
        (f"evaluation of v{e.policy_version}", e.time - e.seconds, e.time, {"reward_mean": e.reward_mean})
        for e in run.evaluations
    ]
    yield from _slices(pieces, pid=UPDATES, tid=3, origin=origin, category="evaluation")


def _process(process: Process, *, pid: int, origin: float) -> Iterator[Event]:
    yield from _track(pid, 1, "does")
    states = _generation(process) if process.role == "gserver" else _waits(process)
    yield from _slices(states, pid=pid, tid=1, origin=origin, category="process")
    for row in np.flatnonzero(process.began_anew).tolist():
        yield Event("started again", "i", pid, ts=_microseconds(float(process.times[row + 1]), origin), s="p")
    for gauge in GAUGES.get(process.role, ()):
        column = process.stats.column(gauge)
        for row in np.flatnonzero(np.isfinite(column)).tolist():
            value = {gauge: float(column[row])}
            yield Event(gauge, "C", pid, ts=_microseconds(float(process.times[row]), origin), args=value)


def _waits(process: Process) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield the waits and the work of a process; consecutive heartbeats with the same wait are one piece."""
    times, longest = process.times.tolist(), process.longest_pause
    last, first = len(times) - 1, 0
    for row in range(len(times)):
        after = min(row + 1, last)
        gap = times[after] - times[row] > longest
        waits = process.waits[first]
        if gap or row == last or without_figures(process.waits[after]) != without_figures(waits):
            name = f"waits for {without_figures(waits)}" if waits else "works"
            yield name, times[first], times[row] if gap else times[after], {"waits_for": waits} if waits else {}
            if gap:
                yield "not heard of", times[row], times[after], {}
            first = after


def _generation(process: Process) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield when a gserver generated, paused or was idle, with the share of the time that it computed."""
    times, longest = process.times.tolist(), process.longest_pause
    computed, paused = (np.diff(process.grown(name)).tolist() for name in ("busy_seconds_total", "pause_seconds_total"))
    begin, name, busy = times[0], "", 0.0
    for row, (before, after) in enumerate(pairwise(times)):
        seconds = after - before
        if seconds > longest:
            state = "not heard of"
        elif computed[row] > GENERATES * seconds:
            state = "generates"
        else:
            state = "paused" if paused[row] > GENERATES * seconds else "idle"
        if state != name:
            if name:
                yield name, begin, before, _share(name, busy, before - begin)
            begin, name, busy = before, state, 0.0
        busy += computed[row]
    if name:
        yield name, begin, times[-1], _share(name, busy, times[-1] - begin)


def _share(name: str, busy: float, seconds: float) -> dict[str, Any]:
    return {"busy_share": round(min(1.0, busy / seconds), 3)} if name == "generates" and seconds > 0 else {}


def _finite(figures: Any, names: Sequence[str]) -> dict[str, float]:
    """Return the named `figures` that JSON can represent: those with finite values."""
    return {name: figures[name] for name in names if abs(figures.get(name, float("inf"))) < float("inf")}
