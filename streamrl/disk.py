"""Waiting until what was written is on the disk. What is renamed into its place before that may be there, and empty,
after a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def to_disk(path: Path) -> None:
    """Wait until the file `path`, or the names in the folder `path`, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def all_to_disk(folder: Path) -> None:
    """Wait until all that is in `folder` is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        to_disk(path)
