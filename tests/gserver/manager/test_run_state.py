"""The waiting queue: everyone in turn, only those who are served wake, and nothing that was found is lost."""

from __future__ import annotations

import asyncio

from streamrl.gserver.manager.run_state import WaitingQueue


class Places:
    """Something to be had, and how often it was asked for."""

    def __init__(self) -> None:
        self.free = 0
        self.attempts = 0
        self.given: list[int] = []

    def take(self, who: int) -> int | None:
        self.attempts += 1
        if not self.free:
            return None
        self.free -= 1
        self.given.append(who)
        return who


async def in_line(line: WaitingQueue[int], places: Places, count: int) -> list[asyncio.Task[int | None]]:
    tasks = [asyncio.create_task(line.find(lambda who=who: places.take(who), timeout=30.0)) for who in range(count)]
    while len(line) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return tasks


async def test_places_go_to_the_first_in_line_and_nobody_else_is_asked() -> None:
    line: WaitingQueue[int] = WaitingQueue()
    places = Places()
    tasks = await in_line(line, places, 1000)
    asked = places.attempts
    places.free = 3
    line.wake()
    line.wake()
    await asyncio.sleep(0.01)
    assert places.given == [0, 1, 2]
    assert places.attempts - asked == 4, "three who were served, and the first who was not"
    assert [task.done() for task in tasks[:5]] == [True, True, True, False, False]
    line.close()
    assert await asyncio.gather(*tasks[3:]) == [None] * 997


async def test_who_comes_later_does_not_overtake() -> None:
    line: WaitingQueue[int] = WaitingQueue()
    places = Places()
    (first,) = await in_line(line, places, 1)
    places.free = 1
    late = asyncio.create_task(line.find(lambda: places.take(99), timeout=0.05))
    await asyncio.sleep(0)
    line.wake()
    assert await first == 0
    assert await late is None


async def test_who_leaves_unserved_lets_the_next_one_try() -> None:
    """Who asked for what there was not, while there is something for those behind."""
    line: WaitingQueue[int] = WaitingQueue()
    places = Places()
    places.free = 1
    greedy = asyncio.create_task(line.find(lambda: None, timeout=0.05))
    await asyncio.sleep(0)
    modest = asyncio.create_task(line.find(lambda: places.take(1), timeout=30.0))
    assert await greedy is None
    async with asyncio.timeout(10):
        assert await modest == 1
