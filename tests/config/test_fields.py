"""How often something happens, against plain counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.fields import Every, every

periods = st.integers(0, 6)
walks = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.floats(0, 5)), max_size=30)
"""How far epoch, step and clock move between two looks."""


def positions(walk: list[tuple[int, int, float]], start: tuple[int, int, float]) -> list[tuple[int, int, float]]:
    found = []
    epoch, step, now = start
    for epochs, steps, seconds in walk:
        epoch, step, now = epoch + epochs, step + steps, now + seconds
        found.append((epoch, step, now))
    return found


def answers(setting: Every, walk: list[tuple[int, int, float]], start: tuple[int, int, float]) -> list[bool]:
    frequency = setting.since(epoch=start[0], step=start[1], now=start[2])
    return [frequency.due(epoch=e, step=s, now=t) for e, s, t in positions(walk, start)]


@given(periods, periods, st.floats(0, 8), walks, st.integers(0, 20), st.integers(0, 20))
def test_each_is_counted_by_itself_and_whichever_comes_first_fires(
    epochs: int, steps: int, seconds: float, walk: list[tuple[int, int, float]], epoch: int, step: int
) -> None:
    start = (epoch, step, 100.0)
    alone = zip(
        answers(every(epochs=epochs), walk, start),
        answers(every(steps=steps), walk, start),
        answers(every(seconds=seconds), walk, start),
        strict=True,
    )
    together = answers(every(epochs=epochs, steps=steps, seconds=seconds), walk, start)
    assert together == [any(fired) for fired in alone]


@given(st.integers(1, 7), walks, st.integers(0, 30))
def test_steps_fire_once_for_each_stretch_with_a_multiple_in_it(
    period: int, walk: list[tuple[int, int, float]], start: int
) -> None:
    before = start
    for fired, (_, step, _) in zip(
        answers(every(steps=period), walk, (0, start, 0.0)), positions(walk, (0, start, 0.0)), strict=True
    ):
        assert fired == any(number % period == 0 for number in range(before + 1, step + 1))
        before = step


@given(st.integers(1, 7), st.integers(0, 40), st.integers(0, 40))
def test_a_resumed_run_keeps_the_rhythm(period: int, stopped: int, more: int) -> None:
    whole = answers(every(epochs=period, steps=period), [(1, 1, 0.0)] * (stopped + more), (0, 0, 0.0))
    resumed = answers(every(epochs=period, steps=period), [(1, 1, 0.0)] * more, (stopped, stopped, 0.0))
    assert resumed == whole[stopped:]


@given(st.floats(0.1, 5), walks)
def test_seconds_never_fire_closer_together_than_asked(seconds: float, walk: list[tuple[int, int, float]]) -> None:
    last = 0.0
    for fired, (_, _, now) in zip(
        answers(every(seconds=seconds), walk, (0, 0, 0.0)), positions(walk, (0, 0, 0.0)), strict=True
    ):
        assert fired == (now - last >= seconds)
        last = now if fired else last


def test_nothing_is_ever_due_without_a_period() -> None:
    assert not every().ever
    assert every(seconds=0.5).ever
    assert not any(answers(every(), [(9, 9, 99.0)] * 3, (0, 0, 0.0)))


@pytest.mark.parametrize("wrong", [{"epochs": -1}, {"steps": -1}, {"seconds": -0.1}])
def test_periods_below_0_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="below 0"):
        every(**wrong)
