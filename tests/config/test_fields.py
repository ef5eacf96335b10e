"""Frequencies, against plain counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.fields import Every, every

periods = st.integers(0, 6)
walks = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.floats(0, 5)), max_size=30)
"""Changes of epoch, step and clock between two calls."""


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


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("never", Every()),
        ("1 step", Every(steps=1)),
        ("100 steps", Every(steps=100)),
        ("2 epochs", Every(epochs=2)),
        ("15m", Every(seconds=900.0)),
        ("1.5h, 20 steps", Every(steps=20, seconds=5400.0)),
        ("30 s, 1 epoch,7steps", Every(epochs=1, steps=7, seconds=30.0)),
    ],
)
def test_a_frequency_is_written_in_words(text: str, meaning: Every) -> None:
    assert every(text) == meaning
    assert meaning.ever == (text != "never")


@pytest.mark.parametrize(
    "text", ["", "often", "100", "-1 steps", "1.5 steps", "1m, 2m", "5 steps,", "never, 5m", "3 w"]
)
def test_another_form_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r'save_every = .*write it as "100 steps"'):
        every(text, key="save_every")


@given(periods, periods, st.floats(0, 8), walks, st.integers(0, 20), st.integers(0, 20))
def test_each_period_is_counted_by_itself(
    epochs: int, steps: int, seconds: float, walk: list[tuple[int, int, float]], epoch: int, step: int
) -> None:
    start = (epoch, step, 100.0)
    alone = zip(
        answers(Every(epochs=epochs), walk, start),
        answers(Every(steps=steps), walk, start),
        answers(Every(seconds=seconds), walk, start),
        strict=True,
    )
    together = answers(Every(epochs=epochs, steps=steps, seconds=seconds), walk, start)
    assert together == [any(fired) for fired in alone]


@given(st.integers(1, 7), walks, st.integers(0, 30))
def test_steps_fire_once_for_each_stretch_with_a_multiple_in_it(
    period: int, walk: list[tuple[int, int, float]], start: int
) -> None:
    before = start
    for fired, (_, step, _) in zip(
        answers(Every(steps=period), walk, (0, start, 0.0)), positions(walk, (0, start, 0.0)), strict=True
    ):
        assert fired == any(number % period == 0 for number in range(before + 1, step + 1))
        before = step


@given(st.integers(1, 7), st.integers(0, 40), st.integers(0, 40))
def test_a_resumed_run_keeps_the_rhythm(period: int, stopped: int, more: int) -> None:
    both = Every(epochs=period, steps=period)
    whole = answers(both, [(1, 1, 0.0)] * (stopped + more), (0, 0, 0.0))
    assert answers(both, [(1, 1, 0.0)] * more, (stopped, stopped, 0.0)) == whole[stopped:]


@given(st.floats(0.1, 5), walks)
def test_seconds_never_fire_closer_together_than_asked(seconds: float, walk: list[tuple[int, int, float]]) -> None:
    last = 0.0
    for fired, (_, _, now) in zip(
        answers(Every(seconds=seconds), walk, (0, 0, 0.0)), positions(walk, (0, 0, 0.0)), strict=True
    ):
        assert fired == (now - last >= seconds)
        last = now if fired else last


def test_never_is_never_due() -> None:
    assert not any(answers(Every(), [(9, 9, 99.0)] * 3, (0, 0, 0.0)))
