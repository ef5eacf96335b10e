"""Write `rollouts/`: groups appended to segments, which are thinned out when the disk budget is used up.

`records/rollouts.py` defines the format; `trainer/worker/keeper.py` chooses the groups.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from streamrl.errors import DataError
from streamrl.records.rollouts import (
    DTYPES,
    FOLDER,
    FRAMES,
    ROW,
    ROWS,
    Head,
    KeptGroup,
    SegmentName,
    first_line,
    read_rows,
    rows_of,
    segments_in,
)

log = logging.getLogger(__name__)

LEVEL = 3
"""Level of zstd's compression."""
SEGMENTS = 16
"""Approximate number of segments in a rank's share of the disk budget."""


class _Encoded(NamedTuple):
    rows: NDArray[np.void]
    """`[n]` rows without the place of their frames."""
    frames: bytes


_encoder = msgspec.json.Encoder()


class GroupEncoder:
    """Encodes groups as rows and frames; to be used by one thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)

    def encode(self, group: KeptGroup) -> _Encoded:
        arrays = [
            (name, np.asarray(getattr(group, name), dtype)) for name, dtype in DTYPES.items() if _has(group, name)
        ]
        head = Head(
            **{name: getattr(group, name) for name in Head.__struct_fields__ if name != "arrays"},
            arrays=[(name, array.dtype.str, len(array)) for name, array in arrays],
        )
        first = self._zstd.compress(_encoder.encode(head))
        second = self._zstd.compress(b"".join(_shuffled(array) for _, array in arrays))
        rows = rows_of(group)
        rows["head_bytes"], rows["body_bytes"] = len(first), len(second)
        return _Encoded(rows, first + second)


def _has(group: KeptGroup, name: str) -> bool:
    return getattr(group, name) is not None


def _shuffled(array: NDArray[Any]) -> bytes:
    """Return the byte planes of `array`, as HDF5's shuffle filter has them."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.dtype.itemsize).T.tobytes()


class _Closed(NamedTuple):
    name: SegmentName
    bytes: int

    @property
    def level(self) -> int:
        """Number of times that it was thinned out: each time it was merged with a segment of the same level."""
        return (self.name.last - self.name.first + 1).bit_length() - 1


class RolloutWriter:
    """Appends groups to one rank's folder, and keeps it within its disk budget.

    When the budget is used up, the two oldest adjacent segments that have been thinned out equally often are merged:
    the new segment has every second step of the two. So the newest part of a run is whole, and the older a part is, the
    sparser it is. The first step stays, and so do the two newest segments, regardless of the budget.
    """

    def __init__(self, folder: Path, *, most_bytes: int, policy_version: int) -> None:
        """Remove rollouts of steps after `policy_version`, which a resumed run makes again.

        No file is made before the first group. Raises `OSError`.
        """
        self._folder = folder
        self._most_bytes = most_bytes
        self._encoder = GroupEncoder()
        _rewind(folder, policy_version=policy_version)
        self._closed = [_Closed(name, self._bytes_of(name)) for name in segments_in(folder)]
        self._number = max((segment.name.last for segment in self._closed), default=0)
        self._files: tuple[BinaryIO, BinaryIO] | None = None
        """The files of rows and of frames; None: no segment is open."""
        self._sizes = (0, 0)

    @property
    def bytes(self) -> int:
        """Bytes on the disk."""
        return sum(segment.bytes for segment in self._closed) + sum(self._sizes)

    def append(self, group: KeptGroup) -> None:
        """Write `group`; raises `OSError`, and leaves the files as they were, if that fails."""
        rows, frames = self._encoder.encode(group)
        if self._files is None:
            self._begin_segment()
        assert self._files is not None
        rows["place"] = self._sizes[1]
        try:
            _write_all(self._files[1], frames)
            _write_all(self._files[0], rows.tobytes())
        except OSError:
            for file, size in zip(self._files, self._sizes, strict=True):
                file.truncate(file.seek(size))
            raise
        self._sizes = (self._sizes[0] + rows.nbytes, self._sizes[1] + len(frames))
        if sum(self._sizes) > self._most_bytes / SEGMENTS:
            self.close()
        if self.bytes > self._most_bytes:
            self._thin_out()

    def close(self) -> None:
        """End the segment; the next group begins a new one."""
        if self._files is not None:
            for file in self._files:
                file.close()
            self._closed.append(_Closed(SegmentName(self._number, self._number), sum(self._sizes)))
            self._files, self._sizes = None, (0, 0)

    def _begin_segment(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = SegmentName(self._number + 1, self._number + 1)
        line = first_line(ROW)
        frames = name.file(self._folder, FRAMES).open("wb", buffering=0)
        try:
            rows = name.file(self._folder, ROWS).open("wb", buffering=0)
            _write_all(rows, line)
        except OSError:
            frames.close()
            _remove(self._folder, name)
            raise
        self._number += 1
        self._files, self._sizes = (rows, frames), (len(line), 0)

    def _thin_out(self) -> None:
        while self.bytes > self._most_bytes and len(self._closed) > 2:
            old = self._closed[:-1] if self._files is not None else self._closed[:-2]
            pair = next((i for i, (a, b) in enumerate(pairwise(old)) if a.level == b.level), None)
            try:
                if pair is None:
                    raise DataError("no two segments are as old as each other")
                self._closed[pair : pair + 2] = [self._together(*self._closed[pair : pair + 2])]
            except (OSError, DataError) as error:
                log.info("the oldest rollouts in %s are removed: %s", self._folder, error)
                _remove(self._folder, self._closed.pop(0).name)

    def _together(self, older: _Closed, newer: _Closed) -> _Closed:
        """Merge two segments into one with every second step, which takes their place."""
        name = SegmentName(older.name.first, newer.name.last)
        parts = [(part, read_rows(part.name.file(self._folder, ROWS))[0]) for part in (older, newer)]
        steps = np.unique(np.concatenate([rows["step"] for _, rows in parts]))
        column = "step" if len(steps) > 1 else "seq"  # with a single step, every second group is kept
        kept = np.unique(np.concatenate([rows[column] for _, rows in parts]))[::2]
        chosen = []
        unfinished = name.file(self._folder, FRAMES + ".unfinished")
        unfinished_rows = name.file(self._folder, ROWS + ".unfinished")
        try:
            with unfinished.open("wb") as frames:
                for part, rows in parts:
                    mine = rows[np.isin(rows[column], kept)].copy()
                    with part.name.file(self._folder, FRAMES).open("rb") as source:
                        for group in _by_place(mine):
                            place = frames.tell()
                            source.seek(int(group["place"][0]))
                            frames.write(source.read(int(group["head_bytes"][0]) + int(group["body_bytes"][0])))
                            group["place"] = place
                    chosen.append(mine)
            unfinished_rows.write_bytes(first_line(ROW) + b"".join(rows.tobytes() for rows in chosen))
            unfinished.replace(name.file(self._folder, FRAMES))
            unfinished_rows.replace(name.file(self._folder, ROWS))
        except OSError:
            for left in (unfinished, unfinished_rows):
                left.unlink(missing_ok=True)
            raise
        for part in (older, newer):
            _remove(self._folder, part.name)
        return _Closed(name, self._bytes_of(name))

    def _bytes_of(self, name: SegmentName) -> int:
        return sum(name.file(self._folder, ending).stat().st_size for ending in (ROWS, FRAMES))


def rewind(run_dir: Path, *, policy_version: int) -> None:
    """Remove the rollouts of steps after `policy_version` from the run in `run_dir`, which is about to repeat them.

    This covers all ranks, since the run may continue with fewer. Raises `OSError`.
    """
    for folder in (run_dir / FOLDER).glob("rank-*"):
        _rewind(folder, policy_version=policy_version)


def _rewind(folder: Path, *, policy_version: int) -> None:
    for name in segments_in(folder):
        file = name.file(folder, ROWS)
        try:
            rows, start, dtype = read_rows(file)
        except DataError as error:
            log.warning("left as it is: %s", error)
            continue
        keep = int((rows["step"] <= policy_version).sum())  # steps ascend
        if not keep:
            _remove(folder, name)
        elif keep < len(rows):
            os.truncate(file, start + keep * dtype.itemsize)


def _by_place(rows: NDArray[np.void]) -> Iterator[NDArray[np.void]]:
    """Yield the rows of each group of a segment, as views."""
    changes = np.flatnonzero(np.diff(rows["place"])) + 1
    for first, end in pairwise([0, *changes.tolist(), len(rows)]):
        if end > first:
            yield rows[first:end]


def _write_all(file: BinaryIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) or 0 :]


def _remove(folder: Path, name: SegmentName) -> None:
    """Remove the segment's rows first: without them, no reader looks for the frames."""
    for ending in (ROWS, FRAMES):
        name.file(folder, ending).unlink(missing_ok=True)
