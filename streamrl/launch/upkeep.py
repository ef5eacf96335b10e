"""Keeps a run's folder in order while the run goes on: logs that grow too long are cut, a full disk is told.

Whoever writes to a log need not know of it: its process, what a library prints, a process that it has started. Each has
the file open to append, so a log is copied aside and made empty, not renamed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

EVERY_SECONDS = 10.0
MOST_LOG_BYTES = 64 * 2**20
"""A log that is longer becomes its older half, in the place of the one before it."""
OLDER = ".1"
PROBE = b"\0" * 65536
"""What has to find room in the folder."""


async def keep_in_order(run_dir: Path, *, tell: Callable[[str], None], every_seconds: float = EVERY_SECONDS) -> None:
    """Until cancelled. `tell` shows a sentence to the user, once when the disk is full and once when it has room."""
    told = ""
    while True:
        problem = await asyncio.to_thread(_look_after, run_dir)
        if problem and not told:
            tell(
                f"nothing can be written to {run_dir} ({problem}): the run goes on; its logs are lost, its figures "
                "wait, and no checkpoint is written until there is room"
            )
        elif told and not problem:
            tell(f"{run_dir} can be written again")
        told = problem
        await asyncio.sleep(every_seconds)


def _look_after(run_dir: Path) -> str:
    """Cut the logs, and answer why nothing can be written; empty: it can."""
    try:
        for file in (run_dir / "logs").glob("*.log"):
            cut(file, most=MOST_LOG_BYTES)
        with tempfile.TemporaryFile(dir=run_dir, buffering=0) as probe:
            left = memoryview(PROBE)
            while left:
                left = left[probe.write(left) or 0 :]
    except OSError as error:
        return error.strerror or str(error)
    return ""


def cut(file: Path, *, most: int) -> None:
    """Move the content of `file` aside if it has more than `most` bytes; lines that come in that moment are lost."""
    if file.stat().st_size > most:
        with file.open("rb") as full, file.with_name(file.name + OLDER).open("wb") as older:
            shutil.copyfileobj(full, older)
        os.truncate(file, 0)
