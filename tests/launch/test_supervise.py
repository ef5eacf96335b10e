"""When a process that died is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.launch.supervise import LONGEST_DELAY_SECONDS, Restarts

ROUNDING = 1e-6


def test_each_waits_twice_as_long_until_there_were_too_many() -> None:
    restarts = Restarts(most=3, window=100.0, delay=1.0)
    assert [restarts.allow("a", now=now) for now in (0.0, 10.0, 20.0, 30.0)] == [1.0, 2.0, 4.0, None]
    assert restarts.allow("b", now=30.0) == 1.0
    assert restarts.count("a") == 3


def test_what_is_long_ago_does_not_count() -> None:
    restarts = Restarts(most=1, window=100.0, delay=1.0)
    assert [restarts.allow("a", now=now) for now in (0.0, 99.0, 100.0)] == [1.0, None, 1.0]


def test_one_that_died_too_often_rests_until_the_window_has_moved_on() -> None:
    restarts = Restarts(most=2, window=100.0, delay=1.0)
    assert [restarts.allow("a", now=now) for now in (0.0, 10.0, 20.0)] == [1.0, 2.0, None]
    assert restarts.rest("a", now=20.0) == 80.0
    assert restarts.allow("a", now=101.0) is None
    assert restarts.rest("a", now=101.0) == 9.0
    assert Restarts(most=0, window=100.0, delay=1.0).rest("b", now=0.0) is None


@given(st.lists(st.floats(0, 50), max_size=60), st.integers(0, 10))
def test_never_more_than_allowed_within_a_window(pauses: list[float], most: int) -> None:
    restarts = Restarts(most=most, window=100.0, delay=1.0)
    now, times = 0.0, []
    for pause in pauses:
        now += pause
        delay = restarts.allow("a", now=now)
        if delay is None:
            rest = restarts.rest("a", now=now)
            if rest is not None:
                now += rest
                times.append(now)
        else:
            assert 1.0 <= delay <= LONGEST_DELAY_SECONDS
            times.append(now)
    assert all(sum(begin <= time < begin + 100.0 - ROUNDING for time in times) <= max(most, 0) for begin in times)
