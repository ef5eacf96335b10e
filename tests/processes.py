"""Which processes live."""

from __future__ import annotations

import psutil


def lives(pid: int) -> bool:
    """Whether there is such a process that has not ended. It may end at any time, also while it is asked."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
