"""Files of JSON lines: appended to on a disk that may be full for a while, and read back after a crash."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from streamrl.errors import UNDECODABLE, DataError
from streamrl.hooks import without_garbage_collection

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 16 * 2**20
"""Most bytes of lines that wait for room on the disk; further lines are lost."""
MOST_READ = 64 * 2**20
"""Most bytes of a file that are read at a time."""

REMEMBERED = 256
"""Number of bytes before the reading position that are compared to recognize a file."""

Record = TypeVar("Record")


class LineFile:
    """Append lines to a file, each handed to the operating system at once; no method raises `OSError`.

    Bytes that the disk does not accept wait in memory and are written before the next line, from where it was cut off.
    """

    def __init__(self, path: Path) -> None:
        """`path` and its folder are made with the first line."""
        self.path = path
        self._file: BinaryIO | None = None
        self._waiting = bytearray()
        self._failing = False

    @property
    def size(self) -> int:
        """Bytes in the file now; 0 before its first line."""
        return os.fstat(self._file.fileno()).st_size if self._file is not None else 0

    def append(self, line: bytes) -> None:
        """Write `line`, which has no newline at its end."""
        if len(self._waiting) < MAX_WAITING_BYTES:
            self._waiting += line + b"\n"
        try:
            while self._waiting:
                del self._waiting[: self._opened().write(self._waiting)]
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written (%s): its lines wait, and the run continues", self.path, error)
            self._failing = True
        else:
            if self._failing:
                log.warning("%s is written again", self.path)
            self._failing = False

    def close(self) -> None:
        """Close the file; the next line opens it again."""
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


class Lines(Generic[Record]):
    """Reads the records that were appended to a file of JSON lines since the last call."""

    def __init__(self, file: Path, kind: Any, *, begin: int = 0) -> None:
        """`kind`: type of the records; lines of another type are left out. `begin`: bytes to skip."""
        self._file = file
        self._decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(kind)
        self._offset = begin
        self._inode: int | None = None
        self._last = b""
        """The bytes before `_offset`."""
        self.unreadable = 0
        """Number of lines that were left out."""

    def new(self) -> tuple[bool, list[Record]]:
        """Return whether the file was replaced, so that earlier records do not count, and its new records.

        At most `MOST_READ` bytes are read at a time; the rest, and an incomplete last line, are left for the next call.
        There are no records if the file does not exist or cannot be read.
        """
        try:
            with self._file.open("rb") as stream:
                state = os.fstat(stream.fileno())
                known = self._inode if self._inode is not None else state.st_ino
                anew = self._offset > 0 and (state.st_size < self._offset or state.st_ino != known)
                if not anew and state.st_size == self._offset:
                    return False, []
                stream.seek(max(0, self._offset - len(self._last)))
                # A file that took this one's place may have the same inode number.
                if anew or stream.read(len(self._last)) != self._last:
                    anew, self._offset = self._offset > 0, 0
                    stream.seek(0)
                self._inode = state.st_ino
                data = stream.read(MOST_READ)
        except OSError:
            return False, []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._last = ((b"" if anew else self._last) + complete)[-REMEMBERED:]
        with without_garbage_collection(stays=False):
            return anew, list(self._decoded(complete))

    def _decoded(self, data: bytes) -> Iterator[Record]:
        for line in data.splitlines():
            try:
                yield self._decoder.decode(line)
            except UNDECODABLE:
                self.unreadable += 1


def decode_line(
    line: bytes, decoder: msgspec.json.Decoder[Record], *, what: str, file: Path | str, number: int
) -> Record:
    """Decode one line of `file`.

    `what` names the expected content in the error, as "a JSON object"; `number` counts lines from 1.
    Raises `DataError` with file, line number, reason and the beginning of the line.
    """
    try:
        return decoder.decode(line)
    except UNDECODABLE as error:
        raise DataError(f"{file}, line {number}: not {what} ({error}); it begins {line[:60]!r}") from error


def read_lines(file: Path, kind: type[Record]) -> list[tuple[bytes, Record]]:
    """Return each line of `file`, without its newline, with its record; empty if there is no such file.

    Lines that are not a `kind`, such as one that a crash cut off, are left out with a warning that names the first.
    Raises `OSError` if the file cannot be read.
    """
    decoder = msgspec.json.Decoder(kind)
    found: list[tuple[bytes, Record]] = []
    errors: list[DataError] = []
    with without_garbage_collection(stays=False):
        for number, line in enumerate(_content(file).splitlines(), start=1):
            try:
                record = decode_line(line, decoder, what="a record of this file", file=file, number=number)
                found.append((line, record))
            except DataError as error:
                errors.append(error)
    if errors:
        log.warning("%s: %d lines cannot be read and are left out, the first: %s", file, len(errors), errors[0])
    return found


def read_records(file: Path, kind: type[Record]) -> list[Record]:
    """Return the records of `file`; see `read_lines`."""
    return [record for _, record in read_lines(file, kind)]


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
