"""What is tried again: for how long, with which pauses, and what the log says of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from streamrl import waits
from streamrl.waits import Retry

FAILED = RuntimeError("no connection")


class Clock:
    """Time that only pauses move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(waits, "asyncio", SimpleNamespace(sleep=clock.sleep))
    return clock


def fail_until_given_up(retried: Retry) -> None:
    async def fail() -> None:
        while await retried.pause(FAILED):
            pass

    asyncio.run(fail())


def test_pauses_double_up_to_the_longest_and_end_with_patience(clock: Clock) -> None:
    retried = Retry("it", patience=6.0)
    fail_until_given_up(retried)
    assert clock.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 0.9])
    assert retried.failing_seconds == pytest.approx(6.0)


def test_a_success_ends_the_row_and_is_told(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    retried = Retry("POST /it", patience=30.0)
    assert asyncio.run(retried.pause(FAILED))
    assert asyncio.run(retried.pause(FAILED))
    assert [record.message for record in caplog.records] == ["POST /it is tried again for 30 s: no connection"]
    retried.succeeded()
    assert caplog.records[-1].message == "POST /it succeeded after 0.3 s"
    retried.succeeded()
    assert len(caplog.records) == 2
    assert asyncio.run(retried.pause(FAILED))
    assert clock.pauses[-1] == pytest.approx(waits.FIRST_PAUSE_SECONDS)
    assert len(caplog.records) == 3, "each row of failures is told"
