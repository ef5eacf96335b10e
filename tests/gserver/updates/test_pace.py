"""Calls to all gservers leave the event loop time for other work."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.updates.calls import CALLS_PER_TURN, WeightCalls
from streamrl.transport.generation import ServerInfo


async def test_calls_start_in_order_and_few_in_each_turn() -> None:
    started: list[str] = []

    class Client:
        async def get(self, address: str, *args: Any, **options: Any) -> ServerInfo:
            started.append(address)
            return ServerInfo()

    calls = WeightCalls(Client(), timeout=1.0)  # type: ignore[arg-type]
    gservers = [Gserver(index, str(index)) for index in range(10 * CALLS_PER_TURN)]
    tasks = [asyncio.create_task(calls.info(gserver)) for gserver in gservers]
    tasks[CALLS_PER_TURN + 1].cancel()
    counts = [0]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        counts.append(len(started))
    assert started == [str(index) for index in range(len(tasks)) if index != CALLS_PER_TURN + 1]
    assert max(after - before for before, after in itertools.pairwise(counts)) <= CALLS_PER_TURN
