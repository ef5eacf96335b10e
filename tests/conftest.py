"""What holds for all tests."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("unhurried")

LONGEST_FIRST = ("tests/e2e/test_learning", "tests/e2e/", "tests/trainer/backends/")
"""Tests of these take much longer than all others: whoever begins with one of them last would be waited for."""

gc.disable()  # while torch and the like are imported, which stay: see streamrl.importing


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the long tests to all processes of pytest, as what each does first.

    `--dist worksteal` gives each process an equal part of the tests, in order.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ranked = sorted(items, key=_length)
    long = [item for item in ranked if _length(item) < len(LONGEST_FIRST)]
    short = ranked[len(long) :]
    dealt: list[pytest.Item] = []
    for process in range(processes):
        own = long[process::processes]
        size = (len(items) - len(dealt)) // (processes - process)
        dealt += own + [short.pop(0) for _ in range(min(size - len(own), len(short)))]
    items[:] = dealt + short


def _length(item: pytest.Item) -> int:
    """Place in `LONGEST_FIRST`; behind its end for all other tests."""
    return next((i for i, prefix in enumerate(LONGEST_FIRST) if item.nodeid.startswith(prefix)), len(LONGEST_FIRST))
