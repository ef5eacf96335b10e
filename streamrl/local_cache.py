"""What this machine keeps between runs: converted models, compiled libraries, what its processor can do."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


def cache_home() -> Path:
    """Return the cache's folder: `$STREAMRL_CACHE`, else `~/.cache/streamrl`."""
    return Path(os.environ.get("STREAMRL_CACHE") or Path.home() / ".cache" / "streamrl")


@contextmanager
def making(path: Path) -> Iterator[bool]:
    """Hold the lock under which `path`, a file or folder of the cache, is made; gives whether nobody else makes it.

    Another process that wants to make it waits, and should then look whether it is there. On a file system without
    locks both make it at once: what is made has to be put in its place whole.
    """
    alone = True
    with path.with_name(f".{path.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that is making %s", path.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # as Lustre often is
            log.debug("%s cannot be locked: %s", file.name, error)
            alone = False
        yield alone


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Keep `path`, a folder of the cache that is there already or will be made, from `remove_unused` of any process."""
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(_use_of(path).open("w")), fcntl.LOCK_SH)
        except OSError as error:  # without locks nothing is removed; without a cache, who makes `path` will say so
            log.debug("%s cannot be locked: %s", path, error)
        yield


def remove_unused(path: Path) -> None:
    """Remove `path`, a folder of the cache, unless a process has it in use."""
    with ExitStack() as held:
        try:
            fcntl.flock(held.enter_context(_use_of(path).open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            leaving = path.with_name(f".{path.name}-removed")
            shutil.rmtree(leaving, ignore_errors=True)  # of a process that was ended meanwhile
            path.rename(leaving)  # what is there under its name is whole
        except OSError as error:  # in use, without locks, or removed by another process
            log.debug("%s stays: %s", path, error)
            return
        shutil.rmtree(leaving, ignore_errors=True)
        log.info("removed %s, which nobody uses any more", path)


def _use_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.use")
