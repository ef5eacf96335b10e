"""Follows files that other processes append to: new lines, last lines, warnings."""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path

_BADLY = re.compile(r"^\S+ (WARNING|ERROR|CRITICAL) +(.*)$")


class Tail:
    """Yields the complete lines that were appended to a file since the last call."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._offset = 0

    def new_lines(self) -> list[str]:
        """Without a file: none. A last line without its end is left for the next call."""
        try:
            with self.file.open("rb") as stream:
                if stream.seek(0, os.SEEK_END) < self._offset:  # it was cut (`upkeep`), and began anew
                    self._offset = 0
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode(errors="replace").splitlines()


class Warnings:
    """Collects what the processes of a run warn of in their logs."""

    def __init__(self, folder: Path, *, keep: int = 20) -> None:
        self._folder = folder
        self._tails: dict[Path, Tail] = {}
        self._kept: deque[str] = deque(maxlen=keep)

    def recent(self) -> list[str]:
        """The last warnings, oldest first: process name and message."""
        for file in sorted(self._folder.glob("*.log")):
            tail = self._tails.setdefault(file, Tail(file))
            for line in tail.new_lines():
                if match := _BADLY.match(line):
                    self._kept.append(match[2])
        return list(self._kept)


def last_lines(file: Path, count: int, *, most_bytes: int = 16384) -> list[str]:
    """The last `count` lines of `file` that are not empty; none if there is no file."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - most_bytes))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
