"""Waiting until written data are on disk. A file that is renamed into its place before that may be there, but empty,
after a loss of power."""

from __future__ import annotations

import os
from pathlib import Path

OWNER = "owner.lock"
"""Name of the file that the process which writes to a folder keeps locked for as long as it lives."""


def to_disk(path: Path) -> None:
    """Wait until the file `path`, or the names in the folder `path`, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def all_to_disk(folder: Path) -> None:
    """Wait until all content of `folder` is on disk."""
    for path in [*folder.rglob("*"), folder]:
        to_disk(path)
