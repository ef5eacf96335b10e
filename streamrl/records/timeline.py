"""`timeline.jsonl`: the activity of each process of a run over time, for plots and for the planner.

It covers the whole run and stays below `MAX_BYTES`: when the file is full, every second heartbeat of each process is
removed from it, and only every second one is written from then on. The more processes there are, the fewer heartbeats
of each are written, so that a large run costs no more than one of `HEARTBEATS_PER_SECOND` processes. A full disk does
not stop the controller, which is its only writer.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec

from streamrl import essential
from streamrl.records.files import LineFile, read_lines

log = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"
MAX_BYTES = 32 * 2**20
HEARTBEATS_PER_SECOND = 100
"""Most heartbeats that are written per second, over all processes."""
DEPARTED_SECONDS = 60.0
"""A process whose next heartbeat is overdue for this many seconds no longer counts as one of them."""
PROCESSOR_SECONDS = "processor_seconds_total"
"""A counter that each process has: where it decreases, the process was restarted."""
CHILDREN_SECONDS = "children_processor_seconds_total"
"""The same counter for a process's children: reward processes, agents, a real SGLang server."""
CLOSING_SECONDS = 5.0
"""Longest wait for a disk that does not respond."""


class FrequentFailure(msgspec.Struct, frozen=True):
    """The error that has cost a process most groups, responses or held-out prompts since its start."""

    error: str
    """The first such exception, in one line."""
    count: int
    """How often it or another one of its kind (`error_kind`) was raised."""
    example: str
    """The row that it was raised for first, its prompt and its answer, shortened."""

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{self.error} ({times}, first for {self.example})"


_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FIGURES = re.compile(r"""\d+|'[^']*'|"[^"]*\"""")


def error_kind(error: str) -> str:
    """Return `error` without numbers and quoted text: errors of one kind count as one."""
    return _FIGURES.sub("", error)


def without_figures(text: str) -> str:
    """Return `text` with # for each of its numbers, so that waits for the same thing have the same name."""
    return _NUMBER.sub("#", text)


def most_frequent(failures: Iterable[FrequentFailure]) -> FrequentFailure | None:
    """Return the most frequent of `failures` and add up the counts of each kind; None if there are none."""
    found: dict[str, FrequentFailure] = {}
    for failure in failures:
        kind = error_kind(failure.error)
        known = found.get(kind)
        found[kind] = failure if known is None else msgspec.structs.replace(known, count=known.count + failure.count)
    return max(found.values(), key=lambda failure: failure.count, default=None)


class HeartbeatEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="heartbeat"):
    """One heartbeat of a process."""

    time: float
    """Seconds since the epoch."""
    role: str
    """`controller`, or the role with which the process registered."""
    index: int
    """Number of the process within its role."""
    stats: dict[str, float]
    """Counters and gauges of the process by name."""
    waiting_for: str = ""
    """The reason for which the process waits; empty: it works."""
    failure: FrequentFailure | None = None
    """None: no failure so far, or the process makes no groups."""


class PublicationEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="publication"):
    """One attempt at a weight update. Times are in seconds since the epoch."""

    time: float
    """Time of its end."""
    begin: float
    end: float
    pause: float
    """Longest pause of generation on a gserver, in seconds."""
    version: int
    """The policy version that was published."""
    done: bool
    """False: it failed and was rolled back."""
    error: str
    """Reason of the failure."""


TimelineEntry = HeartbeatEntry | PublicationEntry


class Timeline:
    """Writes entries to `timeline.jsonl` in a thread of its own; `close` it at the end."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._file = LineFile(folder / TIMELINE_FILE)
        self._max_bytes = max_bytes
        self._limit = max_bytes
        """Size in bytes at which the file is thinned out next."""
        self._encoder = msgspec.json.Encoder()
        self._every = 1
        """One of this many heartbeats of each process is written."""
        self._heartbeats: Counter[tuple[str, int]] = Counter()
        self._next: dict[tuple[str, int], float] = {}
        """Process that reported lately → earliest time at which its next heartbeat is written."""
        self._forget_at = 0.0
        """Time at which members that have left are removed from `_next`."""
        self._entries: SimpleQueue[TimelineEntry | None] = SimpleQueue()
        self._thread = essential.thread(self._write, name="the timeline")
        self._thread.start()

    def add(self, entry: TimelineEntry) -> None:
        """Queue `entry` for writing; returns at once."""
        self._entries.put(entry)

    def close(self) -> None:
        """Wait until all entries are written, for at most `CLOSING_SECONDS`."""
        self._entries.put(None)
        self._thread.join(CLOSING_SECONDS)

    def _write(self) -> None:
        while (entry := self._entries.get()) is not None:
            if isinstance(entry, HeartbeatEntry):
                process = entry.role, entry.index
                if entry.time < self._next.get(process, 0.0):
                    continue
                if entry.time >= self._forget_at:
                    self._next = {of: due for of, due in self._next.items() if due >= entry.time - DEPARTED_SECONDS}
                    self._forget_at = entry.time + DEPARTED_SECONDS
                self._next[process] = entry.time + len(self._next) / HEARTBEATS_PER_SECOND
                self._heartbeats[process] += 1
                if self._heartbeats[process] % self._every:
                    continue
            self._file.append(self._encoder.encode(entry))
            if self._file.size > self._limit:
                self._thin_out()
        self._file.close()

    def _thin_out(self) -> None:
        """Keep every second heartbeat of each process, and every weight update as long as they are few."""
        thinner = self._file.path.with_suffix(".thinner")
        try:
            lines: list[tuple[bytes, TimelineEntry]]
            lines = read_lines(self._file.path, TimelineEntry)  # type: ignore[arg-type]
            kept = list(_every_second(lines, of=HeartbeatEntry))
            if sum(len(line) + 1 for line, _ in kept) > 0.75 * self._max_bytes:
                kept = list(_every_second(kept, of=PublicationEntry))
            thinner.write_bytes(b"".join(line + b"\n" for line, _ in kept))
            self._file.close()
            thinner.replace(self._file.path)
        except OSError as error:
            log.warning("%s stays as long as it is: %s", self._file.path, error)
            with contextlib.suppress(OSError):
                thinner.unlink(missing_ok=True)
            self._limit = self._file.size + self._max_bytes // 32  # else the whole file would be read for each line
        else:
            self._every *= 2
            self._limit = self._max_bytes


def _every_second(
    lines: Iterable[tuple[bytes, TimelineEntry]], *, of: type[TimelineEntry]
) -> Iterator[tuple[bytes, TimelineEntry]]:
    """Yield `lines` without every other entry of the type `of` of each process."""
    seen: Counter[tuple[str, int]] = Counter()
    for line, entry in lines:
        if isinstance(entry, of):
            process = (entry.role, entry.index) if isinstance(entry, HeartbeatEntry) else ("", 0)
            seen[process] += 1
            if seen[process] % 2 == 0:
                continue
        yield line, entry
