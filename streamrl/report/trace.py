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
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from streamrl.records.timeline import PROCESSOR_SECONDS, HeartbeatEntry
from streamrl.report.reading import Records

TRAINER, UPDATES, FIRST_PROCESS = 1, 2, 3
"""Numbers of the trace's processes."""
ROLES = ("controller", "gserver", "rollout", "model_worker")
"""Order of the processes from top to bottom; other roles follow."""
GAUGES = {
    "controller": ("ledger_room", "groups_running", "groups_untrained", "admissions_waiting", "groups_held"),
    "gserver": ("running", "queued"),
    "rollout": ("groups_running", "requests_in_flight"),
    "model_worker": ("groups_held",),
}
"""Role → figures of its heartbeats that are drawn as curves."""
CURVES = ("reward_mean", "effective_sample_size", "tokens_per_second")
"""Figures of the steps that are drawn as curves."""
AWAY_BEATS = 8.0
"""A process was away if it is silent for this many usual intervals between its heartbeats."""
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


def write_trace(records: Records, file: Path) -> int:
    """Write the trace of a run as `file`, compressed if its name ends in `.gz`; return the number of events.

    Raises `OSError` if it cannot be written.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    with gzip.open(file, "wb", compresslevel=4) if file.suffix == ".gz" else file.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for count, event in enumerate(events(records), start=1):
            out.write((b",\n" if count > 1 else b"") + encoder.encode(event))
        out.write(b"\n]}\n")
    return count


def events(records: Records) -> Iterator[Event]:
    """Yield all events of a run. Slices of one track neither overlap nor go back in time."""
    origin = _begin(records)
    yield from _named(TRAINER, "trainer", place=0)
    yield from _trainer(records, origin)
    yield from _named(UPDATES, "weight updates", place=1)
    yield from _updates(records, origin)
    yield from _evaluations(records, origin)
    for number, name in enumerate(sorted(records.heartbeats, key=_order)):
        entries = records.heartbeats[name]
        pid = FIRST_PROCESS + number
        yield from _named(pid, name, place=2 + number)
        yield from _process(entries, pid=pid, origin=origin)


def _begin(records: Records) -> float:
    times = [entries[0].time for entries in records.heartbeats.values()]
    times += [update.begin for update in records.publications[:1]]
    times += [begin for step in records.steps for _, begin, _ in step.spans]
    times += [step.time for step in records.steps[:1]]
    return min(times, default=0.0)


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


def _trainer(records: Records, origin: float) -> Iterator[Event]:
    by_name: dict[str, list[tuple[str, float, float, dict[str, Any]]]] = {}
    steps: list[tuple[str, float, float, dict[str, Any]]] = []
    for step in records.steps:
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
        for step in records.steps:
            for value in _finite(step.metrics, (curve,)).values():
                yield Event(curve, "C", TRAINER, ts=_microseconds(step.time, origin), args={curve: value})
    state = "healthy"
    for step in records.steps:
        if step.health.state != state:
            state = step.health.state
            name = f"policy {state}"
            args = {"signs": ", ".join(step.health.signs)}
            yield Event(name, "i", TRAINER, ts=_microseconds(step.time, origin), s="p", args=args)


def _updates(records: Records, origin: float) -> Iterator[Event]:
    made, failed = [], []
    for update in records.publications:
        args: dict[str, Any] = {"pause_seconds": update.pause}
        if update.done:
            made.append((f"v{update.version}", update.begin, update.end, args))
        else:
            failed.append((f"v{update.version} failed", update.begin, update.end, args | {"error": update.error}))
    for tid, name, pieces in ((1, "published", made), (2, "rolled back", failed)):
        if pieces:
            yield from _track(UPDATES, tid, name)
            yield from _slices(pieces, pid=UPDATES, tid=tid, origin=origin, category="publication")


def _evaluations(records: Records, origin: float) -> Iterator[Event]:
    if records.evaluations:
        yield from _track(UPDATES, 3, "evaluations")
    pieces: list[tuple[str, float, float, dict[str, Any]]] = [
        (f"evaluation of v{e.policy_version}", e.time - e.seconds, e.time, {"reward_mean": e.reward_mean})
        for e in records.evaluations
    ]
    yield from _slices(pieces, pid=UPDATES, tid=3, origin=origin, category="evaluation")


def _process(entries: Sequence[HeartbeatEntry], *, pid: int, origin: float) -> Iterator[Event]:
    yield from _track(pid, 1, "does")
    states = _generation(entries) if entries[0].role == "gserver" else _waits(entries)
    yield from _slices(states, pid=pid, tid=1, origin=origin, category="process")
    for before, after in pairwise(entries):
        if after.stats.get(PROCESSOR_SECONDS, 0.0) < before.stats.get(PROCESSOR_SECONDS, 0.0):
            yield Event("started again", "i", pid, ts=_microseconds(after.time, origin), s="p")
    for gauge in GAUGES.get(entries[0].role, ()):
        for entry in entries:
            for value in _finite(entry.stats, (gauge,)).values():
                yield Event(gauge, "C", pid, ts=_microseconds(entry.time, origin), args={gauge: value})


def _waits(entries: Sequence[HeartbeatEntry]) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield the waits and the work of a process; consecutive heartbeats with the same wait are one piece."""
    begin, longest = entries[0], _longest_pause(entries)
    for entry, after in pairwise([*entries, entries[-1]]):
        gap = after.time - entry.time > longest
        if gap or after is entry or _without_figures(after.waiting_for) != _without_figures(begin.waiting_for):
            waits = begin.waiting_for
            name = f"waits for {_without_figures(waits)}" if waits else "works"
            yield name, begin.time, entry.time if gap else after.time, {"waits_for": waits} if waits else {}
            if gap:
                yield "not heard of", entry.time, after.time, {}
            begin = after


def _generation(entries: Sequence[HeartbeatEntry]) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield when a gserver generated, paused or was idle, with the share of the time that it computed."""
    begin, name, busy = entries[0].time, "", 0.0
    longest = _longest_pause(entries)
    for before, after in pairwise(entries):
        seconds = after.time - before.time
        computed = _grown(before, after, "busy_seconds_total")
        if seconds > longest:
            state = "not heard of"
        elif computed > GENERATES * seconds:
            state = "generates"
        else:
            state = "paused" if _grown(before, after, "pause_seconds_total") > GENERATES * seconds else "idle"
        if state != name:
            if name:
                yield name, begin, before.time, _share(name, busy, before.time - begin)
            begin, name, busy = before.time, state, 0.0
        busy += computed
    if name:
        yield name, begin, entries[-1].time, _share(name, busy, entries[-1].time - begin)


def _share(name: str, busy: float, seconds: float) -> dict[str, Any]:
    return {"busy_share": round(min(1.0, busy / seconds), 3)} if name == "generates" and seconds > 0 else {}


def _grown(before: HeartbeatEntry, after: HeartbeatEntry, counter: str) -> float:
    """Return the growth of a counter between two heartbeats; a restarted process began at 0."""
    first, last = before.stats.get(counter, 0.0), after.stats.get(counter, 0.0)
    return last - first if last >= first else last


def _longest_pause(entries: Sequence[HeartbeatEntry]) -> float:
    """Return the seconds without a heartbeat after which a process counts as away."""
    pauses = sorted(after.time - before.time for before, after in pairwise(entries))
    return AWAY_BEATS * max(1.0, pauses[len(pauses) // 2]) if pauses else float("inf")


def _without_figures(text: str) -> str:
    """Return `text` with # for its numbers, so that waits for the same thing have the same name."""
    return re.sub(r"\d+(?:\.\d+)?", "#", text)


def _finite(figures: Any, names: Sequence[str]) -> dict[str, float]:
    """Return the named `figures` that JSON can represent: those with finite values."""
    return {name: figures[name] for name in names if abs(figures.get(name, float("inf"))) < float("inf")}


def _order(name: str) -> tuple[int, str, int]:
    role, _, index = name.rpartition("/")
    return ROLES.index(role) if role in ROLES else len(ROLES), role, int(index) if index.isdecimal() else 0
