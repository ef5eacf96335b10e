"""Write `rollouts/`: groups as Parquet files, the oldest of which are removed when the disk budget is used up.

`records/rollouts.py` defines the columns; `trainer/worker/keeper.py` chooses the groups.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streamrl.errors import DataError
from streamrl.records.rollouts import FOLDER, NAMES, SCHEMA, KeptGroup, numbered, read, rows_of

log = logging.getLogger(__name__)

FILE_BYTES = 8 * 2**20
"""Size in memory at which groups fill a file."""


class RolloutWriter:
    """Writes the files of one rank, and keeps them within its disk budget."""

    def __init__(self, folder: Path, *, most_bytes: int, policy_version: int) -> None:
        """Remove rollouts of steps after `policy_version`, which a resumed run makes again.

        No file is made before the first group. Raises `OSError`, and `DataError` for a folder in a former format.
        """
        self._folder = folder
        self._most_bytes = most_bytes
        _rewind(folder, policy_version=policy_version)
        files = numbered(folder)
        self._sizes = {path: path.stat().st_size for path in files.values()}
        """Files on the disk, oldest first, with their sizes in bytes."""
        self._number = max(files, default=0)
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes on the disk."""
        return sum(self._sizes.values())

    @property
    def pending(self) -> int:
        """Number of groups that are not on the disk yet."""
        return len(self._pending)

    @property
    def full(self) -> bool:
        """Whether the pending groups fill a file."""
        return self._pending_bytes >= min(FILE_BYTES, self._most_bytes / 4)

    def append(self, group: KeptGroup) -> None:
        """Add `group` to the pending ones."""
        rows = rows_of(group)
        self._pending.append(rows)
        self._pending_bytes += rows.nbytes

    def write(self) -> None:
        """Write the pending groups as one file, which appears at once, and remove the oldest files beyond the budget.
        Raises `OSError`; no group is pending afterwards in any case."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if not pending:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._number + 1:06d}.parquet"
        _write(path, pa.Table.from_batches(pending))
        self._number += 1
        self._sizes[path] = path.stat().st_size
        while self.bytes > self._most_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]


def rewind(run_dir: Path, *, policy_version: int) -> None:
    """Remove the rollouts of steps after `policy_version` from the run in `run_dir`, which is about to repeat them.

    This covers all ranks, since the run may continue with fewer. Raises `OSError`, and `DataError` for a folder in a
    former format.
    """
    for folder in (run_dir / FOLDER).glob("rank-*"):
        _rewind(folder, policy_version=policy_version)


def _rewind(folder: Path, *, policy_version: int) -> None:
    for unfinished in folder.glob(".*.unfinished"):
        unfinished.unlink(missing_ok=True)
    for path in reversed(numbered(folder).values()):
        try:
            rows = read(path)
        except DataError as error:
            log.warning("left as it is: %s", error)
            continue
        kept = rows.filter(pc.less_equal(rows["step"], policy_version))
        if len(kept) == len(rows):
            return  # steps ascend
        if len(kept):
            _write(path, kept.cast(SCHEMA))
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, rows: pa.Table) -> None:
    """Write `rows` as `path`, which appears at once; raises `OSError`, and leaves no other file, if that fails."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        pq.write_table(
            rows,
            unfinished,
            compression="zstd",
            use_dictionary=[*NAMES, "prompt"],
            write_statistics=["step", "seq"],
            write_page_checksum=True,
        )
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
