"""The request-reply channel over real sockets."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest
import zmq
import zmq.asyncio

from streamrl.errors import DeadlineExceeded, PeerError, PeerLost, WireError
from streamrl.transport import request_reply
from streamrl.transport.request_reply import ReplyChannel, RequestChannel


class Double(msgspec.Struct, tag=True):
    value: int


class Fail(msgspec.Struct, tag=True):
    pass


class Hang(msgspec.Struct, tag=True):
    pass


class Answer(msgspec.Struct):
    value: int


class News(msgspec.Struct):
    text: str


async def serve(channel, begun):
    """Reads on while calls wait to begin, as a worker has to."""
    ordered = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(carry_out(channel, ordered, begun))
        while True:
            await ordered.put(await channel.receive())


async def carry_out(channel, ordered, begun):
    while True:
        call_id, call = await ordered.get()
        if not await channel.begin(call_id):
            continue
        begun.append(call)
        if isinstance(call, Double):
            await channel.reply(call_id, Answer(call.value * 2))
        elif isinstance(call, Fail):
            await channel.fail(call_id, "Traceback: it broke")


@contextlib.asynccontextmanager
async def master():
    notices: list[tuple[int, News]] = []
    channel = RequestChannel(host="127.0.0.1", notice_type=News, on_notice=lambda w, n: notices.append((w, n)))
    channel.notices = notices
    try:
        yield channel
    finally:
        await channel.close()


@contextlib.asynccontextmanager
async def worker(channel, number):
    end = ReplyChannel(endpoint=channel.endpoint, worker=number, call_type=Double | Fail | Hang)
    end.begun = []
    end.hush = end._beating.cancel
    serving = asyncio.create_task(serve(end, end.begun))
    try:
        yield end
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await end.close()


async def test_calls_reach_their_worker_and_are_answered():
    async with master() as m, worker(m, 0), worker(m, 1):
        await m.wait_for({0, 1}, patience=5)
        calls = [m.call(i % 2, Double(i), Answer, timeout=5) for i in range(50)]
        assert [a.value for a in await asyncio.gather(*calls)] == [2 * i for i in range(50)]


async def test_workers_see_concurrent_requests_in_one_order():
    async with master() as m, worker(m, 0) as a, worker(m, 1) as b, worker(m, 2) as c:
        await m.wait_for({0, 1, 2}, patience=5)
        everywhere = [
            m.request(dict.fromkeys((i % 3, (i + 1) % 3, (i + 2) % 3), Double(i)), Answer, timeout=5) for i in range(40)
        ]
        singly = [m.call(i % 3, Double(100 + i), Answer, timeout=5) for i in range(40)]
        replies = await asyncio.gather(*(request for pair in zip(everywhere, singly, strict=True) for request in pair))
        assert replies[0] == {0: Answer(0), 1: Answer(0), 2: Answer(0)}
        shared = [[call.value for call in end.begun if call.value < 100] for end in (a, b, c)]
        assert shared[0] == shared[1] == shared[2] == list(range(40))


async def test_no_worker_begins_a_request_that_another_does_not_have():
    async with master() as m, worker(m, 0) as a:
        await m.wait_for({0}, patience=5)
        with pytest.raises(DeadlineExceeded, match="model_worker/0, model_worker/1 did not finish Double"):
            await m.request({0: Double(1), 1: Double(1)}, Answer, timeout=0.5)
        assert a.begun == []


@pytest.mark.parametrize("given_up", ["while it is sent", "before it is acknowledged", "by its deadline"])
async def test_a_request_that_is_given_up_before_it_begins_holds_nobody_up(given_up):
    async with master() as m, worker(m, 0) as first, reader_of_nothing(m, 1):
        await m.wait_for({0, 1}, patience=5)
        timeout = 0.2 if given_up == "by its deadline" else 30
        together = asyncio.create_task(m.request({0: Double(1), 1: Double(2)}, Answer, timeout=timeout))
        await asyncio.sleep(0 if given_up == "while it is sent" else 0.3)
        together.cancel()
        with pytest.raises(asyncio.CancelledError if timeout == 30 else DeadlineExceeded):
            await together
        assert (await m.call(0, Double(3), Answer, timeout=5)).value == 6
        assert first.begun == [Double(3)]
        assert not first._waiting


@contextlib.asynccontextmanager
async def reader_of_nothing(channel, number):
    """A worker that lives, and takes no call."""
    end = ReplyChannel(endpoint=channel.endpoint, worker=number, call_type=Double)
    try:
        yield end
    finally:
        await end.close()


async def test_a_call_that_waits_for_its_other_workers_says_so(monkeypatch, caplog):
    monkeypatch.setattr(request_reply, "BEGIN_WARNING_SECONDS", 0.1)
    async with master() as m, worker(m, 0), reader_of_nothing(m, 1):
        await m.wait_for({0, 1}, patience=5)
        with pytest.raises(DeadlineExceeded, match="model_worker/0, model_worker/1 did not finish Double"):
            await m.request({0: Double(1), 1: Double(2)}, Answer, timeout=0.5)
    assert "waits for its other workers to have it" in caplog.text


async def test_the_failure_of_one_worker_fails_the_request_at_once():
    async with master() as m, worker(m, 0), worker(m, 1):
        await m.wait_for({0, 1}, patience=5)
        with pytest.raises(PeerError, match="model_worker/1 failed in Hang:\nTraceback: it broke"):
            await m.request({0: Hang(), 1: Fail()}, Answer, timeout=30)


async def test_a_failure_arrives_with_its_traceback_and_the_worker_lives_on():
    async with master() as m, worker(m, 0):
        await m.wait_for({0}, patience=5)
        with pytest.raises(PeerError, match="model_worker/0 failed in Fail:\nTraceback: it broke"):
            await m.call(0, Fail(), Answer, timeout=5)
        assert (await m.call(0, Double(4), Answer, timeout=5)).value == 8


async def test_a_call_that_takes_too_long_is_named():
    async with master() as m, worker(m, 0):
        await m.wait_for({0}, patience=5)
        with pytest.raises(DeadlineExceeded, match="model_worker/0 did not finish Hang within 0 s"):
            await m.call(0, Hang(), Answer, timeout=0.1)


async def test_a_silent_worker_fails_its_calls(monkeypatch):
    monkeypatch.setattr(request_reply, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    async with master() as m, worker(m, 0) as w:
        await m.wait_for({0}, patience=5)
        w.hush()
        with pytest.raises(PeerLost, match="model_worker/0 has been silent"):
            await m.call(0, Hang(), Answer, timeout=5)


async def test_a_worker_whose_connection_ends_fails_its_calls_long_before_its_silence_would(monkeypatch):
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    async with master() as m, worker(m, 1):
        async with worker(m, 0):
            await m.wait_for({0, 1}, patience=5)
            hanging = asyncio.create_task(m.call(0, Hang(), Answer, timeout=30))
            assert (await m.call(0, Double(1), Answer, timeout=5)).value == 2
        with pytest.raises(PeerLost, match="model_worker/0 is gone: its connection has ended"):
            await asyncio.wait_for(hanging, 10)
        with pytest.raises(PeerLost, match="model_worker/0 is gone"):
            await m.request({0: Double(1), 1: Double(1)}, Answer, timeout=30)
        assert await m.living([0, 1], patience=5) == [1]


async def test_a_worker_that_is_started_anew_fails_the_calls_of_its_predecessor():
    async with master() as m:
        async with worker(m, 0):
            await m.wait_for({0}, patience=5)
            hanging = asyncio.create_task(m.call(0, Hang(), Answer, timeout=30))
            assert (await m.call(0, Double(1), Answer, timeout=5)).value == 2
        async with worker(m, 0):
            with pytest.raises(PeerLost, match="model_worker/0 was started anew"):
                await hanging
            assert (await m.call(0, Double(2), Answer, timeout=5)).value == 4


async def test_the_living_are_those_that_spoke_lately(monkeypatch):
    monkeypatch.setattr(request_reply, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    async with master() as m, worker(m, 2):
        async with worker(m, 1):
            await m.wait_for({1, 2}, patience=5)
            assert await m.living([0, 1, 2], patience=5) == [1, 2]
        with pytest.raises(PeerLost):
            await m.call(1, Hang(), Answer, timeout=10)
        assert await m.living([0, 1, 2], patience=5) == [2]
        with pytest.raises(DeadlineExceeded, match="no word from model_worker/0, model_worker/1, nor within"):
            await m.living([0, 1], patience=0.2)
        returning = asyncio.create_task(m.living([0, 1], patience=10))
        await asyncio.sleep(0)
        async with worker(m, 1):
            assert await returning == [1]


async def test_a_worker_that_never_comes_is_named():
    async with master() as m, worker(m, 1):
        with pytest.raises(DeadlineExceeded, match="model_worker/0 did not connect"):
            await m.wait_for({0, 1}, patience=0.3)


async def test_notices_arrive_and_nonsense_is_passed_over():
    async with master() as m, worker(m, 0) as w:
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(m.endpoint)
        for junk in ([b"x"], [b"N", b"", b"\xff\xff"], [b"R", b"12345678", b""]):
            await stranger.send_multipart(junk)
        await w.notify(News("stored"))
        await m.wait_for({0}, patience=5)
        assert (await m.call(0, Double(1), Answer, timeout=5)).value == 2
        assert m.notices == [(0, News("stored"))]
        stranger.close()
        context.term()


async def test_an_answer_of_another_type_is_refused():
    async with master() as m, worker(m, 0):
        await m.wait_for({0}, patience=5)
        with pytest.raises(WireError, match="Double was answered with something else"):
            await m.call(0, Double(1), News, timeout=5)
