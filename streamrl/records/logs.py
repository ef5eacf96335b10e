"""The logs of a run's processes: read from their ends and merged, and warnings at a limited rate."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

MOST_BYTES = 512 * 2**10
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DAY = 86400.0
_LINE = re.compile(r"^(\d\d):(\d\d):(\d\d) (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(.*)$")


class LogLine(msgspec.Struct, frozen=True):
    """One entry of a log, with the lines that belong to it, such as a traceback."""

    time: float
    """Seconds since the epoch, inferred from the file's date, since a log has only the time of day. 0: unknown."""
    process: str
    level: str
    """Empty for output that is no log entry."""
    text: str


def processes_with_logs(folder: Path) -> list[str]:
    """Return the names of the processes that have a log in `folder`, for example `gserver-0`. Links, which may lead
    elsewhere, are ignored."""
    return sorted(file.stem for file in folder.glob("*.log") if not file.is_symlink())


def tail(
    folder: Path,
    *,
    processes: Collection[str] = (),
    level: str = "DEBUG",
    text: str = "",
    most: int = 500,
    most_bytes: int = MOST_BYTES,
) -> list[LogLine]:
    """Return the last `most` entries of the logs in `folder`, oldest first.

    Only entries of `processes` (empty: all), of `level` or above (output without a level counts as INFO), that contain
    `text` in upper or lower case. `most_bytes`: length of the end of each log that is read.
    """
    least, wanted = LEVELS.index(level), text.lower()
    found = [
        line
        for name in processes_with_logs(folder)
        if not processes or name in processes
        for line in _entries(folder / f"{name}.log", process=name, most=most_bytes)
        if LEVELS.index(line.level or "INFO") >= least and wanted in line.text.lower()
    ]
    return sorted(found, key=lambda line: line.time)[-most:]


def _entries(file: Path, *, process: str, most: int) -> list[LogLine]:
    try:
        with file.open("rb") as stream:
            state = os.fstat(stream.fileno())
            stream.seek(max(0, state.st_size - most))
            data = stream.read(most)
    except OSError:
        return []
    lines = data.decode(errors="replace").split("\n")
    if state.st_size > most:
        lines = lines[1:]  # the first one is cut off
    entries: list[tuple[float, str, list[str]]] = []
    for line in lines:
        if match := _LINE.match(line):
            hours, minutes, seconds = (int(part) for part in match.groups()[:3])
            text = match[5].removeprefix(f"{'/'.join(process.rsplit('-', 1))} ")
            entries.append((3600.0 * hours + 60.0 * minutes + seconds, match[4], [text]))
        elif line.strip():
            shown = line.rsplit("\r", 1)[-1]  # a progress bar's last state
            if entries:
                entries[-1][2].append(shown)
            else:
                entries.append((-1.0, "", [shown]))
    written = time.localtime(state.st_mtime)
    midnight = state.st_mtime - (3600 * written.tm_hour + 60 * written.tm_min + written.tm_sec) - state.st_mtime % 1
    found, after = [], state.st_mtime + 1.0
    for seconds_of_day, kind, texts in reversed(entries):
        moment = 0.0
        if seconds_of_day >= 0:
            moment = midnight + seconds_of_day
            while moment > after + 1.0:  # it was written on an earlier day
                moment -= DAY
            after = moment
        found.append(LogLine(moment, process, kind, "\n".join(texts)))
    return found[::-1]


WARNINGS_AT_ONCE = 5
"""Number of warnings that are logged at once; after these, one every `SECONDS_PER_WARNING`."""
SECONDS_PER_WARNING = 10.0


class RateLimitedLog:
    """Warnings about events that other processes can cause at any rate, from one thread at a time.

    The next logged line counts the suppressed ones.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._credit = float(WARNINGS_AT_ONCE)
        self._at = time.monotonic()
        self._left_out = 0

    def warning(self, message: str, *arguments: object) -> None:
        """Log a warning, or count it."""
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._at) / SECONDS_PER_WARNING, float(WARNINGS_AT_ONCE))
        self._at = now
        if self._credit < 1:
            self._left_out += 1
            return
        self._credit -= 1
        if self._left_out:
            message += f" (and {self._left_out} more like this since the last line)"
            self._left_out = 0
        self._log.warning(message, *arguments)
