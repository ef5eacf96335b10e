"""What a worker tells of its requests: the latest counts, in batches, until the manager has heard them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from streamrl.errors import PeerLost
from streamrl.rollout import in_flight
from streamrl.rollout.in_flight import InFlightReports, RequestCount
from streamrl.transport.control.groups import InFlight


class Control:
    """Hears messages, but for the first `deaf` of them."""

    def __init__(self, *, deaf: int = 0) -> None:
        self.heard: list[InFlight] = []
        self.deaf = deaf
        self.more = asyncio.Event()

    async def in_flight(self, message: InFlight) -> None:
        if self.deaf:
            self.deaf -= 1
            raise PeerLost("gone")
        self.heard.append(message)
        self.more.set()

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


async def test_what_was_not_heard_is_told_again_with_what_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "RETRY_SECONDS", 0.05)
    control = Control(deaf=2)
    reports = InFlightReports(control, worker=0)  # type: ignore[arg-type]
    running = asyncio.create_task(reports.run())
    counts = [RequestCount(seq, siblings=2, reports=reports) for seq in range(3)]
    with counts[0].request(5), counts[1].request(6):
        await asyncio.sleep(0.03)
        with counts[0].request(5):
            reports.forget(1)
            told = await control.next()
    assert told[0] == (2, 10)
    assert 2 not in told
    running.cancel()
