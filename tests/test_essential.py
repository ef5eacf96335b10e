"""Work that a process cannot do without: its failure ends what it was begun in."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamrl import essential
from streamrl.errors import EssentialFailed
from streamrl.essential import ends_with_its_work


def break_down() -> None:
    raise RecursionError("too deep")


async def break_down_later() -> None:
    await asyncio.sleep(0)
    break_down()


@pytest.mark.parametrize("kind", ["task", "thread"])
async def test_a_failure_ends_the_owner_with_its_cause(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    cleaned_up = []

    async def component() -> None:
        async with ends_with_its_work():
            if kind == "task":
                essential.begin(break_down_later(), name="receiver")
            else:
                essential.thread(break_down, name="receiver").start()
            try:
                await asyncio.sleep(10)
            finally:
                await asyncio.sleep(0)  # what is left in order is not cancelled again
                cleaned_up.append(essential.failure())

    with pytest.raises(EssentialFailed, match="receiver failed: RecursionError: too deep") as raised:
        await component()
    assert isinstance(raised.value.__cause__, RecursionError)
    assert cleaned_up == [raised.value]
    assert "in break_down" in caplog.text, "its traceback"
    await asyncio.sleep(0)  # nothing is left of the cancellation


async def test_a_failure_wins_over_what_the_end_raises() -> None:
    async def component() -> None:
        async with ends_with_its_work():
            essential.begin(break_down_later(), name="receiver")
            try:
                await asyncio.sleep(10)
            finally:
                raise ValueError("while cleaning up")

    with pytest.raises(EssentialFailed, match="too deep"):
        await component()


async def test_neither_an_end_nor_a_cancellation_is_a_failure() -> None:
    async with ends_with_its_work():
        ended = essential.begin(asyncio.sleep(0), name="short")
        cancelled = essential.begin(asyncio.sleep(10), name="cancelled")
        thread = essential.thread(lambda: time.sleep(0), name="short")
        thread.start()
        await ended
        cancelled.cancel()
        await asyncio.wait([cancelled])
        thread.join()
        await asyncio.sleep(0.01)
    assert essential.failure() is None


async def test_what_was_begun_outside_does_not_end_what_is_inside() -> None:
    outside = essential.begin(break_down_later(), name="outside")
    async with ends_with_its_work():
        await asyncio.wait([outside])
        await asyncio.sleep(0.01)
