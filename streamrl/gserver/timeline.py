"""`timeline.jsonl` in the run's folder: what every pool was doing when, for plots.

It covers the whole run and stays below `MOST_BYTES`: when it is full, every second heartbeat of each process is left
out, of those that are there and of those that come. A disk that is full or gone does not stop the manager.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import msgspec

from streamrl import essential
from streamrl.errors import UNDECODABLE
from streamrl.gserver.weight_update import UpdateRecord
from streamrl.line_file import LineFile
from streamrl.transport.control.members import Role

log = logging.getLogger(__name__)

MOST_BYTES = 32 * 2**20
CLOSING_SECONDS = 5.0
"""For a disk that does not answer."""


class HeartbeatEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One heartbeat."""

    kind: Literal["heartbeat"] = "heartbeat"
    time: float
    """Seconds since the epoch."""
    role: Role | Literal["manager"]
    index: int
    stats: dict[str, float]
    waiting_for: str


class PublicationEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a weight update."""

    kind: Literal["publication"] = "publication"
    time: float
    """When it ended; all times in seconds since the epoch."""
    begin: float
    end: float
    pause: float
    """Longest pause of generation, in seconds."""
    version: int
    done: bool
    error: str


class _Kind(msgspec.Struct):
    """Whose line it is."""

    kind: str = ""
    role: str = ""
    index: int = 0


class Timeline:
    """Writes events in a thread of its own; `close` it at the end."""

    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self._file = LineFile(folder / "timeline.jsonl")
        self._most = most_bytes
        self._encoder = msgspec.json.Encoder()
        self._every = 1
        """One of so many heartbeats of each process is written."""
        self._beats: Counter[tuple[str, int]] = Counter()
        self._events: SimpleQueue[msgspec.Struct | None] = SimpleQueue()
        self._thread = essential.thread(self._write, name="the timeline")
        self._thread.start()

    def heartbeat(self, event: HeartbeatEntry) -> None:
        self._events.put(event)

    def publication(self, record: UpdateRecord) -> None:
        self._events.put(
            PublicationEntry(
                time=record.end,
                begin=record.begin,
                end=record.end,
                pause=record.pause_seconds,
                version=record.version,
                done=record.done,
                error=record.error,
            )
        )

    def close(self) -> None:
        """Wait until all is written."""
        self._events.put(None)
        self._thread.join(CLOSING_SECONDS)

    def _write(self) -> None:
        while (event := self._events.get()) is not None:
            if isinstance(event, HeartbeatEntry):
                process = event.role, event.index
                self._beats[process] += 1
                if self._beats[process] % self._every:
                    continue
            self._file.append(self._encoder.encode(event))
            if self._file.size > self._most:
                self._every *= 2
                self._thin_out()
        self._file.close()

    def _thin_out(self) -> None:
        """Keep every second line of each process, and of the weight updates as long as they are few."""
        try:
            lines = self._file.path.read_bytes().splitlines(keepends=True)
            kept = list(_every_second(lines, of=("heartbeat",)))
            if sum(map(len, kept)) > 0.75 * self._most:
                kept = list(_every_second(kept, of=("publication",)))
            thinner = self._file.path.with_suffix(".thinner")
            thinner.write_bytes(b"".join(kept))
            self._file.close()
            thinner.replace(self._file.path)
        except OSError as error:
            log.warning("%s stays as long as it is: %s", self._file.path, error)


def _every_second(lines: Iterable[bytes], *, of: Collection[str]) -> Iterator[bytes]:
    """`lines` without every other one of the kinds `of` of each process, and without what cannot be read."""
    seen: Counter[tuple[str, str, int]] = Counter()
    decoder = msgspec.json.Decoder(_Kind)
    for line in lines:
        try:
            whose = decoder.decode(line)
        except UNDECODABLE:
            continue
        key = whose.kind, whose.role, whose.index
        seen[key] += 1
        if whose.kind not in of or seen[key] % 2:
            yield line
