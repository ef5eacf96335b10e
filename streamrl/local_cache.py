"""What this machine keeps between runs: converted models, compiled libraries, what its processor can do."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
