"""Files on disk: waiting until written data are there, and this machine's cache between runs (converted models,
compiled libraries, and the processor's trial results).

A file that is renamed into its place before its data are on disk may be there, but empty, after a loss of power.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


# --- the cache ---

log = logging.getLogger(__name__)


def cache_home() -> Path:
    """Return the cache's folder: `$STREAMRL_CACHE`, else `~/.cache/streamrl`."""
    return Path(os.environ.get("STREAMRL_CACHE") or Path.home() / ".cache" / "streamrl")


@contextmanager
def making(path: Path) -> Iterator[bool]:
    """Hold the lock for making `path`, a file or folder of the cache; yield whether no other process can be making it.

    Another process that wants to make it waits, and should then check whether it exists. On a file system without locks
    both make it at once, so the result has to be moved into its place complete.
    """
    alone = True
    with path.with_name(f".{path.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that is making %s", path.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # as often on Lustre
            log.debug("%s cannot be locked: %s", file.name, error)
            alone = False
        yield alone


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Protect `path`, an existing or future folder of the cache, from `remove_unused` of any process."""
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(_use_of(path).open("w")), fcntl.LOCK_SH)
        except OSError as error:  # without locks nothing is removed; without a cache, making `path` raises an error
            log.debug("%s cannot be locked: %s", path, error)
        yield


def remove_unused(path: Path) -> None:
    """Remove `path`, a folder of the cache, unless a process has it in use."""
    with ExitStack() as held:
        try:
            fcntl.flock(held.enter_context(_use_of(path).open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            leaving = path.with_name(f".{path.name}-removed")
            shutil.rmtree(leaving, ignore_errors=True)  # of a process that was killed
            path.rename(leaving)  # a folder under its own name is always whole
        except OSError as error:  # in use, without locks, or removed by another process
            log.debug("%s stays: %s", path, error)
            return
        shutil.rmtree(leaving, ignore_errors=True)
        log.info("removed %s, which no process uses any more", path)


def _use_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.use")
