"""Checkpoints that are either whole or not there, written while training goes on.

Owns the one thread that writes. Invariants: at most one checkpoint is being written; its folder
appears at once, when all of it is on the disk; older ones are removed only after that.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

from streamrl import progress
from streamrl.device import compute_with
from streamrl.errors import DeadlineExceeded

log = logging.getLogger(__name__)

REPLACED = ".replaced"
"""An older checkpoint of the same name, until the new one is in its place."""


class CheckpointWriter:
    """Writes one checkpoint after another; used by the one thread that computes."""

    def __init__(self, *, keep: int, spare: str | None) -> None:
        """`keep` checkpoints stay, and `spare`, which the run came from."""
        self._keep = keep
        self._spare = spare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=compute_with, initargs=(1,))
        self._writing: tuple[Path, Future[str]] | None = None

    def begin(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Have `write` fill the checkpoint `folder`, and return at once; `settle` comes first."""
        assert self._writing is None, f"{folder} before it is known what became of {self._writing}"
        self._writing = folder, self._thread.submit(self._write, folder, write)

    def settle(self, *, limit: float) -> str:
        """Wait for what is being written; answers why it could not be, or nothing if it was.

        Raises `DeadlineExceeded` after `limit` seconds. A reason is given once.
        """
        if self._writing is None:
            return ""
        folder, future = self._writing
        try:
            failure = future.result(limit)
        except TimeoutError as error:
            if future.done():
                raise
            raise DeadlineExceeded(f"the checkpoint {folder} is not on the disk after {limit:.0f} s") from error
        self._writing = None
        return failure

    def _write(self, folder: Path, write: Callable[[Path], None]) -> str:
        try:
            write_folder(folder, write)
            progress.prune(folder.parent, keep=self._keep, spare=self._spare)
        except (OSError, SafetensorError) as error:  # tolerance point: a full disk must not end a run
            failure = (
                f"the checkpoint {folder} cannot be written ({error}); those before it are whole: make room there, "
                "or lower trainer.keep_checkpoints"
            )
            log.error(failure)
            return failure
        log.info("%s is written", folder)
        return ""


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a temporary folder, then put it in the place of `folder`; if it fails, nothing is left."""
    unfinished = folder.with_name(folder.name + progress.UNFINISHED)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        _to_disk(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        folder.rename(replaced)  # killed here, a run goes on from it under this name
    unfinished.rename(folder)
    if replaced.exists():
        shutil.rmtree(replaced)
    _sync(folder.parent)


def _to_disk(folder: Path) -> None:
    """Let a checkpoint that can be seen be one that survives the loss of power, too."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
