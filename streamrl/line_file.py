"""Files that a run appends lines to, on a disk that may be full for a while."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

MOST_WAITING_BYTES = 16 * 2**20
"""What waits for room beyond this is lost."""


class LineFile:
    """Lines in one file, handed to the operating system at once; no method raises `OSError`.

    What the disk does not take waits in memory and is written with the next line that it takes, from where it was cut.
    """

    def __init__(self, path: Path) -> None:
        """`path` is made with its first line, also its folder."""
        self.path = path
        self._file: BinaryIO | None = None
        self._waiting = bytearray()
        self._failing = False

    @property
    def size(self) -> int:
        """Bytes in the file now; 0 before its first line."""
        return os.fstat(self._file.fileno()).st_size if self._file is not None else 0

    def append(self, line: bytes) -> None:
        """`line` has no end of line."""
        if len(self._waiting) < MOST_WAITING_BYTES:
            self._waiting += line + b"\n"
        try:
            while self._waiting:
                del self._waiting[: self._opened().write(self._waiting)]
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written (%s): it waits, and the run goes on", self.path, error)
            self._failing = True
        else:
            if self._failing:
                log.warning("%s is written again", self.path)
            self._failing = False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torn = self.path.exists() and not _ends_with_newline(self.path)
            self._file = self.path.open("ab", buffering=0)
            if torn:  # an earlier run was cut off in the middle of a line
                self._waiting[:0] = b"\n"
        return self._file


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
