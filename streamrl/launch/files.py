"""The files of a run's folder during the run: last lines of logs; logs that grow too long are cut, and a full disk is
reported.

A log may have several writers that do not know of the cut: its process, a library in it, and child processes. Each has
the file open in append mode, so a log is copied aside and truncated, not renamed.
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

LAST_BYTES = 16384
"""Bytes of a file in which its last lines are found."""


def last_lines(file: Path, count: int, *, begin: int = 0) -> list[str]:
    """Return the last `count` lines of `file` that are not empty; an empty list if there is no file.

    `begin`: bytes to skip, unless the file has become shorter since (`cut`).
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(begin if begin <= size else 0, size - LAST_BYTES))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]


# --- upkeep ---

EVERY_SECONDS = 10.0
MOST_LOG_BYTES = 64 * 2**20
"""Size above which a log is moved aside; it replaces the part that was moved before."""
OLDER = ".1"
PROBE = b"\0" * 65536
"""Data that is written to test whether the disk has room."""


async def keep_in_order(run_dir: Path, *, tell: Callable[[str], None], every_seconds: float = EVERY_SECONDS) -> None:
    """Cut long logs and watch for a full disk until cancelled.

    `tell` shows a sentence to the user, once when the disk is full and once when it has room again.
    """
    told = ""
    while True:
        problem = await asyncio.to_thread(_look_after, run_dir)
        if problem and not told:
            tell(
                f"nothing can be written to {run_dir} ({problem}): the run continues; its logs are lost, its figures "
                "wait, and no checkpoint is written until there is room"
            )
        elif told and not problem:
            tell(f"{run_dir} can be written again")
        told = problem
        await asyncio.sleep(every_seconds)


def _look_after(run_dir: Path) -> str:
    """Cut the logs; return why the folder cannot be written, or an empty string if it can."""
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
    """Move the content of `file` aside if it has more than `most` bytes; lines written at that moment are lost."""
    if file.stat().st_size > most:
        with file.open("rb") as full, file.with_name(file.name + OLDER).open("wb") as older:
            shutil.copyfileobj(full, older)
        os.truncate(file, 0)
