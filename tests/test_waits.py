"""A long wait is named in the log, and not named any more once it is over."""

from __future__ import annotations

import asyncio
import logging

import pytest

from streamrl.waits import warned_of

log = logging.getLogger(__name__)


async def test_a_long_wait_is_named_again_each_time_that_it_has_taken_twice_as_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warned_of(lambda: "the data", after=0.1, log=log):
        await asyncio.sleep(1.0)
    warnings = caplog.text.count("waiting for the data, for")
    assert 2 <= warnings <= 4, "after 0.1, 0.2, 0.4 and 0.8 s"
    await asyncio.sleep(0.9)
    assert caplog.text.count("waiting for the data, for") == warnings


async def test_a_short_wait_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    with warned_of(lambda: "the data", after=30.0, log=log):
        await asyncio.sleep(0)
    assert not caplog.records
