"""`timeline.jsonl` in the run's folder: what every pool was doing when, for plots.

A disk that is full or gone is reported once and does not stop the manager.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.gserver.weight_update import UpdateRecord
from streamrl.transport.control.members import Role

log = logging.getLogger(__name__)


class HeartbeatEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One heartbeat."""

    kind: Literal["heartbeat"] = "heartbeat"
    time: float
    """Seconds since the epoch."""
    role: Role
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


class Timeline:
    """Appends events; created with the run's folder, `close` it at the end."""

    def __init__(self, folder: Path) -> None:
        self._encoder = msgspec.json.Encoder()
        self._path = folder / "timeline.jsonl"
        self._failed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            self._warn(error)

    def heartbeat(self, event: HeartbeatEntry) -> None:
        self._append(event)

    def publication(self, record: UpdateRecord) -> None:
        self._append(
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
        if not self._failed:
            self._file.close()

    def _append(self, event: msgspec.Struct) -> None:
        if self._failed:
            return
        try:
            self._file.write(self._encoder.encode(event) + b"\n")
        except OSError as error:
            self._file.close()
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        self._failed = True
        log.warning("%s cannot be written (%s); the run goes on without a timeline", self._path, error)
