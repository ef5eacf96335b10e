"""A long wait is named in the log, and not named any more once it is over; what a cancelled task raises."""

from __future__ import annotations

import asyncio
import logging

import pytest

from streamrl.waits import cancel, warned_of

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


async def test_the_error_of_a_cancelled_task_is_logged_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    async def fail_at_the_end() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            raise KeyError("a bug")

    caplog.set_level(logging.DEBUG, logger="streamrl.waits")
    task = asyncio.create_task(fail_at_the_end())
    await asyncio.sleep(0)
    await cancel(task, None)
    assert "KeyError: 'a bug'" in caplog.text


async def test_a_short_wait_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    with warned_of(lambda: "the data", after=30.0, log=log):
        await asyncio.sleep(0)
    assert not caplog.records
