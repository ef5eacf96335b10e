"""Calls to all gservers leave the event loop time for other work."""

from __future__ import annotations

import asyncio
import itertools

from streamrl.gserver.updates.calls import CALLS_PER_TURN, Pace


async def test_calls_start_in_order_and_few_in_each_turn():
    pace, started = Pace(), []

    async def call(number: int) -> None:
        await pace.turn()
        started.append(number)

    tasks = [asyncio.create_task(call(number)) for number in range(10 * CALLS_PER_TURN)]
    tasks[CALLS_PER_TURN + 1].cancel()
    counts = [0]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        counts.append(len(started))
    assert started == [number for number in range(len(tasks)) if number != CALLS_PER_TURN + 1]
    assert max(after - before for before, after in itertools.pairwise(counts)) <= CALLS_PER_TURN


async def test_a_single_call_does_not_wait():
    pace = Pace()
    for _ in range(3):
        async with asyncio.timeout(1):
            await pace.turn()
        await asyncio.sleep(0)
