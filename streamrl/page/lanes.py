"""The timeline of every process of a run as lanes of activities, at the resolution of the window. Pure.

A lane is a row of pieces `(begin, end, kind, height, text)`, in seconds since the run's begin: `height` from 0 to 1 is
the share of the piece's time that `kind` took. If there are more pieces than the window has room for, each of its
columns gets one piece for each kind, with the share of the column's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from streamrl.records.table import Column
from streamrl.records.timeline import PublicationEntry
from streamrl.records.view import Process, RunView

MOST_PIECES = 1500
"""Most pieces in a lane's window; if there are more, shares are drawn."""


class LanePiece(msgspec.Struct, frozen=True, array_like=True):
    """One activity of a process, or its share of a stretch of time."""

    begin: float
    """Seconds since the run's begin."""
    end: float
    kind: str
    """`generate`, `pause`, `wait`, `work`, `away`, `restart`, `failed`, or the name of a trainer's span."""
    height: float
    """Share of that time, from 0 to 1."""
    text: str
    """Description; may be empty."""


class Lane(msgspec.Struct, frozen=True):
    """One process, or the trainer as a whole."""

    name: str
    pieces: list[LanePiece]


def lanes(run: RunView, *, begin: float, end: float, columns: int) -> list[Lane]:
    """Return the activities of each process from `begin` to `end`, in seconds since the run's begin, in a window of
    `columns` columns."""
    edges, origin = np.linspace(begin, end, columns + 1), run.begin
    trainer = [
        _of_spans(name, [(b - origin, e - origin) for b, e in spans], edges)
        for name, spans in run.spans().items()
        if name != "publish"
    ]
    updates = _of_updates(run.publications, edges, origin=origin)
    found = [Lane("trainer", [piece for pieces in trainer for piece in pieces]), Lane("weight updates", updates)]
    return found + [Lane(p.name, _of_process(p, edges, origin=origin)) for p in run.ordered_processes()]


def _of_spans(name: str, spans: Sequence[tuple[float, float]], edges: Column) -> list[LanePiece]:
    begins, ends = (np.array(side, dtype=float) for side in zip(*spans, strict=True))
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    inside = (ends > edges[0]) & (begins < edges[-1])
    begins, ends = begins[inside], ends[inside]
    if len(begins) <= MOST_PIECES:
        return [LanePiece(float(b), float(e), name, 1.0, "") for b, e in zip(begins, ends, strict=True)]
    return _shares(name, _covered(begins, ends, edges), edges)


def _covered(begins: Column, ends: Column, edges: Column) -> Column:
    """Return how many seconds of each column the pieces cover."""
    until = np.zeros(len(edges))
    for side, sign in ((begins, 1.0), (ends, -1.0)):
        side = np.sort(side)
        sums = np.concatenate([[0.0], np.cumsum(side)])
        count = np.searchsorted(side, edges)
        until += sign * (edges * count - sums[count])
    return np.diff(until)


def _shares(kind: str, seconds: Column, edges: Column) -> list[LanePiece]:
    width = np.diff(edges)
    share = np.clip(seconds / width, 0.0, 1.0)
    rows = np.flatnonzero(share > 0.004)
    return [LanePiece(float(edges[i]), float(edges[i + 1]), kind, round(float(share[i]), 3), "") for i in rows]


def _of_updates(publications: Sequence[PublicationEntry], edges: Column, *, origin: float) -> list[LanePiece]:
    made = [
        LanePiece(
            update.begin - origin,
            update.end - origin,
            "publish" if update.done else "failed",
            1.0,
            f"version {update.version}, pause {update.pause:.3f} s" + ("" if update.done else f": {update.error}"),
        )
        for update in publications
        if update.end - origin > edges[0] and update.begin - origin < edges[-1]
    ]
    if len(made) <= MOST_PIECES:
        return made
    spans = [(piece.begin, piece.end) for piece in made if piece.kind == "publish"]
    failed = [piece for piece in made if piece.kind == "failed"]
    return _of_spans("publish", spans, edges) + failed[:MOST_PIECES]


def _of_process(process: Process, edges: Column, *, origin: float) -> list[LanePiece]:
    times = process.times - origin
    marks = _away(process, times, edges)  # drawn on top of the others
    if process.role == "gserver":
        return _of_gserver(process, times, edges) + marks
    first, last = _window(times, edges)
    anew = process.began_anew
    if last - first <= MOST_PIECES:
        pieces = []
        at = first
        while at < last:  # consecutive heartbeats with the same wait are one piece
            upto = at + 1
            while upto < last and process.waits[upto] == process.waits[at] and not anew[upto - 1]:
                upto += 1
            text = process.waits[at]
            lasts = upto < len(times) and not anew[upto - 1]  # else the state after the last heartbeat is unknown
            stop = times[upto] if lasts else times[upto - 1]
            pieces.append(LanePiece(float(times[at]), float(stop), "wait" if text else "work", 1.0, text))
            at = upto
        return pieces + marks
    waiting = np.array([bool(text) for text in process.waits])
    gaps = np.where(anew, 0.0, np.diff(times))
    waited, present = (
        np.diff(np.interp(edges, times, np.concatenate([[0.0], np.cumsum(each)])))
        for each in (gaps * waiting[:-1], gaps)
    )
    return [*_shares("wait", waited, edges), *_shares("work", present - waited, edges), *marks]


def _of_gserver(process: Process, times: Column, edges: Column) -> list[LanePiece]:
    first, last = _window(times, edges)
    pieces = []
    for kind, counter in (("generate", "busy_seconds_total"), ("pause", "pause_seconds_total")):
        grown = process.grown(counter)
        if last - first > MOST_PIECES:
            pieces += _shares(kind, np.diff(np.interp(edges, times, grown)), edges)
            continue
        for at in range(first, min(last, len(times) - 1)):
            seconds = times[at + 1] - times[at]
            share = (grown[at + 1] - grown[at]) / seconds if seconds > 0 else 0.0
            if share > 0.004:
                pieces.append(
                    LanePiece(float(times[at]), float(times[at + 1]), kind, round(min(1.0, float(share)), 3), "")
                )
    return pieces


def _away(process: Process, times: Column, edges: Column) -> list[LanePiece]:
    """Return pieces for the gaps without heartbeats and for restarts."""
    began = np.flatnonzero(process.began_anew)
    pieces = [LanePiece(float(times[at]), float(times[at + 1]), "restart", 1.0, "started again") for at in began]
    for at in np.flatnonzero(np.diff(times) > process.longest_pause):
        if at not in began:
            pieces.append(LanePiece(float(times[at]), float(times[at + 1]), "away", 1.0, "not heard of"))
    return [piece for piece in pieces if piece.end > edges[0] and piece.begin < edges[-1]][:MOST_PIECES]


def _window(times: Column, edges: Column) -> tuple[int, int]:
    """Return the rows that cover the window: from the last one before it to the last one in it."""
    first = max(0, int(np.searchsorted(times, edges[0], side="right")) - 1)
    return first, int(np.searchsorted(times, edges[-1], side="left"))
