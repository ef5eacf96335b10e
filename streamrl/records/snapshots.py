"""Snapshots: checkpoints of a run in the memory of its machine, from which it continues after a death.

They have the format of checkpoints on the disk (`progress.py`) and cost no disk. One run has one folder, in which only
its user may read, named after the path of the run's folder:

    /dev/shm/streamrl-snapshots-DIGEST/owner           locked by the controller of the run
                                       step-000012/    the latest

Invariants: a snapshot never fills more than `MOST_OF_FREE` of the free memory. The controller removes the folder at the
end of the run. When it makes its own folder, it removes the folders of other runs that have had no controller and no
new snapshot for `ABANDONED_SECONDS`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from streamrl.machine import SHARED_MEMORY

log = logging.getLogger(__name__)

PREFIX = "streamrl-snapshots-"
OWNER = "owner"
MOST_OF_FREE = 1 / 3
ABANDONED_SECONDS = 600.0
"""A run whose controller has died is restarted, or resumed by hand, within this time, or loses its snapshots."""


def folder_of(run_dir: Path, *, root: Path = SHARED_MEMORY) -> Path:
    """Return the path of the snapshots of the run in `run_dir`."""
    digest = hashlib.sha256(f"{os.geteuid()} {run_dir.resolve()}".encode()).hexdigest()[:16]
    return root / f"{PREFIX}{digest}"


def is_ours(folder: Path) -> bool:
    """Return whether `folder` exists and belongs to this user alone. All users may create files in shared memory."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


@contextmanager
def kept(run_dir: Path, *, root: Path = SHARED_MEMORY) -> Iterator[None]:
    """Make a folder for the snapshots of the run in `run_dir` and lock it, or log a warning if that is impossible.
    Snapshots of an earlier controller of the run stay; the caller removes them."""
    folder = folder_of(run_dir, root=root)
    try:
        for other in root.glob(f"{PREFIX}*"):
            if other != folder and is_ours(other):
                _remove_if_abandoned(other)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not is_ours(folder):
            raise OSError(errno.EPERM, "it belongs to another user")
        lock = (folder / OWNER).open("ab")
    except OSError as error:
        log.warning("no snapshots are kept in memory: %s (%s)", folder, error.strerror)
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield
        finally:
            if not any(folder.glob("step-*")):
                remove(run_dir, root=root)


def in_use(run_dir: Path, *, root: Path = SHARED_MEMORY) -> bool:
    """Return whether a living controller keeps snapshots of the run."""
    try:
        with (folder_of(run_dir, root=root) / OWNER).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def remove(run_dir: Path, *, root: Path = SHARED_MEMORY) -> None:
    """Remove the run's snapshots."""
    folder = folder_of(run_dir, root=root)
    if is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)


def check_room(size: int, *, root: Path = SHARED_MEMORY) -> None:
    """Raise `OSError` if `size` bytes are more than `MOST_OF_FREE` of the free memory."""
    free = min(shutil.disk_usage(root).free, psutil.virtual_memory().available)
    if size > MOST_OF_FREE * free:
        raise OSError(
            errno.ENOSPC,
            f"a snapshot of {size / 2**30:.1f} GiB would take more than {MOST_OF_FREE:.0%} of the "
            f"{free / 2**30:.1f} GiB of memory that are free",
        )


def _remove_if_abandoned(folder: Path) -> None:
    try:
        if time.time() - folder.stat().st_mtime < ABANDONED_SECONDS:
            return
        with (folder / OWNER).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed snapshots of a dead run: %s", folder)
    except OSError:
        log.debug("%s is in use", folder)
