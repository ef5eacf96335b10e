"""What a worker tells of its requests: the latest counts, in batches, until the manager has heard them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from streamrl.rollout.in_flight import InFlightReports, RequestCount
from streamrl.transport.control.groups import InFlight


class Control:
    """Hears messages, and answers while `answers` is set."""

    def __init__(self) -> None:
        self.heard: list[InFlight] = []
        self.more = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    async def in_flight(self, message: InFlight) -> None:
        self.heard.append(message)
        self.more.set()
        await self.answers.wait()

    async def next(self) -> dict[int, tuple[int, int]]:
        await asyncio.wait_for(self.more.wait(), 10)
        self.more.clear()
        return {group.seq: (group.requests, group.tokens) for group in self.heard[-1].groups}


async def test_counts_go_up_and_down_with_the_requests() -> None:
    control = Control()
    reports = InFlightReports(control, worker=3)  # type: ignore[arg-type]
    running = asyncio.create_task(reports.run())
    count = RequestCount(7, siblings=3, reports=reports)
    with ExitStack() as both:
        both.enter_context(count.request(10))
        both.enter_context(count.request(20))
        assert await control.next() == {7: (3, 30)}, "one of three has not begun"
    assert await control.next() == {7: (1, 0)}
    with count.request(10):
        assert await control.next() == {7: (1, 10)}
    assert await control.next() == {7: (0, 0)}
    with count.request(40):
        assert await control.next() == {7: (1, 40)}, "another turn"
    assert {message.worker for message in control.heard} == {3}
    running.cancel()


async def test_what_changes_while_the_manager_is_told_is_told_next_and_what_has_ended_is_not() -> None:
    control = Control()
    control.answers.clear()
    reports = InFlightReports(control, worker=0)  # type: ignore[arg-type]
    running = asyncio.create_task(reports.run())
    counts = [RequestCount(seq, siblings=2, reports=reports) for seq in range(3)]
    with counts[0].request(5), counts[1].request(6):
        assert await control.next() == {0: (2, 5), 1: (2, 6)}
        with counts[0].request(5), counts[1].request(6):
            reports.forget(1)
            control.answers.set()
            assert await control.next() == {0: (2, 10)}
    running.cancel()
