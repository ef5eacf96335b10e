"""What holds for all tests."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("unhurried")

LONGEST_FIRST = ("tests/gserver/contract/", "tests/e2e/test_learning", "tests/e2e/", "tests/trainer/backends/")
"""Tests of these take much longer than all others: whoever begins with one of them last would be waited for."""

gc.disable()  # while torch and the like are imported, which stay: see streamrl.importing


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_length)


def _length(item: pytest.Item) -> int:
    """Place in `LONGEST_FIRST`; behind its end for all other tests."""
    return next((i for i, prefix in enumerate(LONGEST_FIRST) if item.nodeid.startswith(prefix)), len(LONGEST_FIRST))
