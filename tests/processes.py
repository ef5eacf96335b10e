"""Which processes live, and whether those that a test started have ended."""

from __future__ import annotations

import asyncio
import time

import psutil

END_SECONDS = 20.0
"""Time for processes to end, on a machine with other work."""


def lives(pid: int) -> bool:
    """Whether there is such a process that has not ended. It may end at any time, also while it is asked."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def below(pid: int | None = None) -> set[int]:
    """Return the ids of all processes below process `pid`; without one, below this process.

    Compare with an earlier answer: other tests of this process may have started some that last.
    """
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def living(pids: set[int]) -> list[str]:
    """Describe those of `pids` that live, for a failed test."""
    found = []
    for pid in pids:
        try:
            if lives(pid):
                found.append(f"{pid}: {' '.join(psutil.Process(pid).cmdline())[:200]}")
        except psutil.NoSuchProcess:
            continue
    return found


async def assert_no_more_than(before: set[int]) -> None:
    """Assert that every process below this one that is not in `before` ends; the event loop may collect them."""
    until = time.monotonic() + END_SECONDS
    while (left := living(below() - before)) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert not left


def assert_ended(pids: set[int]) -> None:
    """Assert that all of `pids` end."""
    until = time.monotonic() + END_SECONDS
    while (left := living(pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
