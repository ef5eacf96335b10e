"""Checkpoints that are either whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a temporary folder, then put it in the place of `folder` at once."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    write(unfinished)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
