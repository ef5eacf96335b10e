"""The request-reply channel over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import msgspec
import pytest
import zmq
import zmq.asyncio

from streamrl.errors import DeadlineExceeded, PeerError, PeerLost, WireError
from streamrl.transport import request_reply
from streamrl.transport.request_reply import ReplyChannel, RequestChannel
from streamrl.transport.session import Packet
from tests import hostile
from tests.credentials import OTHER_SECRET, credential_of, keys_of, peer_at


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
    while True:
        request, call = await channel.receive()
        begun.append(call)
        if isinstance(call, Double):
            channel.reply(request, Answer(call.value * 2))
        elif isinstance(call, Fail):
            channel.fail(request, "Traceback: it broke")


def reply_channel(endpoint, number, call_type=Double | Fail | Hang, *, joins=1, **credential):
    """`joins`: how many have joined the run so far."""
    credential = credential_of("model_worker", number, to="controller", number=joins, **credential)
    return ReplyChannel(master=peer_at(endpoint), credential=credential, call_type=call_type)


@contextlib.asynccontextmanager
async def master(**settings):
    notices: list[tuple[int, News]] = []
    heard = asyncio.Event()

    def hear(number, notice):
        notices.append((number, notice))
        if notice == News("last"):
            heard.set()

    channel = RequestChannel(keys=keys_of("controller"), notice_type=News, on_notice=hear, **settings)
    channel.notices, channel.heard = notices, heard
    try:
        yield channel
    finally:
        await channel.close()


@contextlib.asynccontextmanager
async def worker(channel, number, *, joins=1):
    end = reply_channel(channel.endpoint, number, joins=joins)
    end.begun = []
    end.hush = end._beating.cancel
    serving = asyncio.create_task(serve(end, end.begun))
    try:
        yield end
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await end.close()


@pytest.mark.parametrize("encrypted", [False, True])
async def test_calls_reach_their_worker_and_are_answered(encrypted):
    async with master(encrypted=encrypted) as m, worker(m, 0), worker(m, 1):
        assert m.endpoint.startswith("curve://" if encrypted else "tcp://")
        await m.wait_for({0, 1}, patience=30)
        calls = [m.call(i % 2, Double(i), Answer, timeout=30) for i in range(50)]
        assert [a.value for a in await asyncio.gather(*calls)] == [2 * i for i in range(50)]


async def test_workers_see_concurrent_requests_in_one_order():
    async with master() as m, worker(m, 0) as a, worker(m, 1) as b, worker(m, 2) as c:
        await m.wait_for({0, 1, 2}, patience=30)
        everywhere = [
            m.request(dict.fromkeys((i % 3, (i + 1) % 3, (i + 2) % 3), Double(i)), Answer, timeout=30)
            for i in range(40)
        ]
        singly = [m.call(i % 3, Double(100 + i), Answer, timeout=30) for i in range(40)]
        replies = await asyncio.gather(*(request for pair in zip(everywhere, singly, strict=True) for request in pair))
        assert replies[0] == {0: Answer(0), 1: Answer(0), 2: Answer(0)}
        shared = [[call.value for call in end.begun if call.value < 100] for end in (a, b, c)]
        assert shared[0] == shared[1] == shared[2] == list(range(40))


async def test_a_failure_arrives_at_once_with_its_traceback_and_the_worker_lives_on():
    async with master() as m, worker(m, 0), worker(m, 1):
        await m.wait_for({0, 1}, patience=30)
        with pytest.raises(PeerError, match="model_worker/1 failed in Hang: Traceback: it broke"):
            await m.request({0: Hang(), 1: Fail()}, Answer, timeout=30)
        assert (await m.call(1, Double(4), Answer, timeout=30)).value == 8


async def test_a_call_that_takes_too_long_is_named(monkeypatch, caplog):
    monkeypatch.setattr(request_reply, "WAIT_WARNING_SECONDS", 0.0)
    async with master() as m, worker(m, 0), worker(m, 1):
        await m.wait_for({0, 1}, patience=30)
        with pytest.raises(DeadlineExceeded, match="model_worker/0 did not finish Hang within 0 s"):
            await m.request({0: Hang(), 1: Double(1)}, Answer, timeout=0.4)
    assert "waiting for model_worker/0 to finish Hang" in caplog.text


async def test_a_silent_worker_fails_its_calls(monkeypatch):
    monkeypatch.setattr(request_reply, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    async with master() as m, worker(m, 0) as w:
        await m.wait_for({0}, patience=30)
        w.hush()
        with pytest.raises(PeerLost, match="model_worker/0 has been silent"):
            await m.call(0, Hang(), Answer, timeout=30)


async def test_a_worker_whose_connection_ends_fails_its_calls_long_before_its_silence_would(monkeypatch):
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    async with master() as m, worker(m, 1):
        async with worker(m, 0):
            await m.wait_for({0, 1}, patience=30)
            hanging = asyncio.create_task(m.call(0, Hang(), Answer, timeout=30))
            assert (await m.call(0, Double(1), Answer, timeout=30)).value == 2
        with pytest.raises(PeerLost, match="model_worker/0 is gone: its connection has ended"):
            await asyncio.wait_for(hanging, 10)
        with pytest.raises(PeerLost, match="model_worker/0 is gone"):
            await m.request({0: Double(1), 1: Double(1)}, Answer, timeout=30)
        assert await m.living([0, 1], patience=30) == [1]


async def test_a_worker_that_is_started_anew_fails_the_calls_of_its_predecessor():
    async with master() as m:
        async with worker(m, 0):
            await m.wait_for({0}, patience=30)
            hanging = asyncio.create_task(m.call(0, Hang(), Answer, timeout=30))
            assert (await m.call(0, Double(1), Answer, timeout=30)).value == 2
        async with worker(m, 0, joins=2):
            with pytest.raises(PeerLost, match="model_worker/0 was restarted"):
                await hanging
            assert (await m.call(0, Double(2), Answer, timeout=30)).value == 4


async def test_the_living_are_those_that_spoke_lately(monkeypatch):
    monkeypatch.setattr(request_reply, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    async with master() as m, worker(m, 2):
        async with worker(m, 1):
            await m.wait_for({1, 2}, patience=30)
            assert await m.living([0, 1, 2], patience=30) == [1, 2]
        with pytest.raises(PeerLost):
            await m.call(1, Hang(), Answer, timeout=10)
        assert await m.living([0, 1, 2], patience=30) == [2]
        with pytest.raises(DeadlineExceeded, match="no message from model_worker/0, model_worker/1 within"):
            await m.living([0, 1], patience=0.2)
        returning = asyncio.create_task(m.living([0, 1], patience=10))
        await asyncio.sleep(0)
        async with worker(m, 1):
            assert await returning == [1]


async def test_a_worker_that_never_comes_is_named(caplog: pytest.LogCaptureFixture):
    async with master() as m, worker(m, 1):
        await m.wait_for({1}, patience=30)
        with pytest.raises(DeadlineExceeded, match="model_worker/0 did not connect"):
            await m.wait_for({0, 1}, patience=0.3, warn_after=0.1)
    assert "waiting for model_worker/0 to connect to the controller, for 0 s now" in caplog.text


NEWS = msgspec.msgpack.encode({"type": "notice", "notice": News("stored")})
DOUBLE = msgspec.msgpack.encode({"request": 1, "call": Double(3)})


def packet_of(place, message):
    return msgspec.msgpack.encode(Packet(place, 0, 0, None, msgspec.Raw(message)))


async def test_no_message_ends_the_master():
    async with master() as m, worker(m, 0):
        await m.wait_for({0}, patience=30)
        context = zmq.asyncio.Context()
        routes = [f"{credential_of('model_worker', n, to='controller').text} x".encode() for n in (70, 7)]
        for identity in (b"70", b"+1", b"0", routes[0], b"9" * 200, routes[1]):
            with context.socket(zmq.DEALER) as stranger:
                stranger.set(zmq.LINGER, 1000)
                stranger.set(zmq.IDENTITY, identity)
                stranger.connect(m.endpoint)
                replies = [{"type": "reply", "request": 1, "result": 1}, {"type": "error", "request": 1, "text": "?"}]
                bodies = [NEWS, *map(msgspec.msgpack.encode, replies)]
                await stranger.send(packet_of(1, hostile.with_unknown_field(NEWS)))
                for frames in hostile.messages([[packet_of(1, body)] for body in bodies], count=300):
                    await stranger.send_multipart(frames)
                await stranger.send(packet_of(1, NEWS))  # ignored if one of the others had the place
                last = msgspec.msgpack.encode({"type": "notice", "notice": News("last")})
                for place in range(2, 5):
                    await stranger.send(packet_of(place, last))
        async with asyncio.timeout(30):
            await m.heard.wait()
        assert {number for number, _ in m.notices} <= {7, 70}, "others are no workers"
        assert not any(task.done() for task in m._tasks)
        assert (await m.call(0, Double(1), Answer, timeout=30)).value == 2
        context.term()


async def test_no_message_ends_a_worker():
    async with pretended_master() as (router, endpoint):
        end = reply_channel(endpoint, 0, call_type=Double)
        receiving = asyncio.create_task(received(end, until=Double(4)))
        name, _ = await router.recv_multipart()
        places = itertools.count(1)
        await router.send_multipart([name, packet_of(1, hostile.with_unknown_field(DOUBLE))])
        for frames in hostile.messages([[packet_of(next(places), DOUBLE)] for _ in range(10)], count=1000):
            await router.send_multipart([name, *frames])
        for place in range(1, 1000):  # one of them has the next place
            last = msgspec.msgpack.encode({"request": 1, "call": Double(4)})
            await router.send_multipart([name, packet_of(place, last)])
        await asyncio.wait_for(receiving, 10)
        await end.close()


async def received(end, *, until):
    while (await end.receive())[1] != until:
        pass


@contextlib.asynccontextmanager
async def pretended_master():
    context = zmq.asyncio.Context()
    with context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        router.set(zmq.SNDHWM, 0)  # otherwise it drops messages that a busy machine reads late
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield router, f"tcp://127.0.0.1:{port}"
    context.term()


async def test_an_answer_that_cannot_be_decoded_fails_its_request_alone():
    async with master() as m:
        end = reply_channel(m.endpoint, 0, call_type=Double)
        await m.wait_for({0}, patience=30)
        asking = asyncio.create_task(m.call(0, Double(1), Answer, timeout=30))
        number, _ = await end.receive()
        end.reply(number, News("no answer"))
        with pytest.raises(WireError, match="the reply to Double cannot be decoded"):
            await asking
        await end.close()


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


class Line:
    """A TCP connection in between, which can be cut with what is on its way."""

    def __init__(self):
        self.lost = 0
        """Bytes that were sent and never arrived."""
        self.swallows = None
        """Whose words are lost: "worker" or "master"."""
        self.connections = 0
        self._open = set()

    async def open(self, endpoint):
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._server = await asyncio.start_server(lambda r, w: self._join(r, w, host, int(port)), "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _join(self, from_worker, to_worker, host, port):
        self.connections += 1
        from_master, to_master = await asyncio.open_connection(host, port)
        self._open |= {to_worker, to_master}
        copying = [self._copy(from_worker, to_master, "worker"), self._copy(from_master, to_worker, "master")]
        await asyncio.gather(*copying, return_exceptions=True)

    async def _copy(self, reader, writer, whose):
        while content := await reader.read(1 << 16):
            if whose == self.swallows:
                self.lost += len(content)
            else:
                writer.write(content)
                await writer.drain()
        writer.close()

    def cut(self):
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def close(self):
        self.cut()
        self._server.close()
        await self._server.wait_closed()


async def test_every_message_arrives_once_and_in_order_though_connections_break(monkeypatch):
    """Notices, calls, replies and errors, also those that ZMQ had sent when the connection broke."""
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.05)
    line = Line()
    async with master() as m, worker(m, 1) as other:
        end, begun, said = reply_channel(await line.open(m.endpoint), 0), [], []
        serving = asyncio.create_task(serve(end, begun))
        await m.wait_for({0, 1}, patience=30)
        for round_, whose in enumerate(("worker", "master", "worker", "master")):
            assert (await m.call(0, Double(1), Answer, timeout=30)).value == 2
            line.swallows = whose
            call = Double(round_) if round_ < 3 else Fail()
            asking = asyncio.create_task(m.request({0: call, 1: call}, Answer, timeout=30))
            said += [f"{round_} {number}" for number in range(3)]
            for text in said[-3:]:
                end.notify(News(text))
            await until(lambda: line.lost > 200)
            line.cut()
            line.swallows, line.lost = None, 0
            if round_ < 3:
                assert await asking == dict.fromkeys((0, 1), Answer(2 * round_))
            else:
                with pytest.raises(PeerError, match="it broke"):
                    await asking
        await until(lambda: len(m.notices) >= len(said) and not end._socket.session.unconfirmed and len(begun) >= 8)
        assert [notice.text for _, notice in m.notices] == said
        calls = [Double(0), Double(1), Double(2), Fail()]
        assert begun == [call for pair in zip([Double(1)] * 4, calls, strict=True) for call in pair]
        assert other.begun == calls
        assert line.connections == 5
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await end.close()
        await line.close()


async def test_notices_of_a_restarted_worker_are_processed_from_its_first_one_on():
    async with master() as m:
        for joins, start in enumerate(("first", "second"), start=1):
            async with worker(m, 0, joins=joins) as end:
                end.notify(News(start))
                await until(lambda: not end._socket.session.unconfirmed)
        assert [notice.text for _, notice in m.notices] == ["first", "second"]


async def test_a_worker_without_an_answer_gives_up(monkeypatch, caplog):
    monkeypatch.setattr(request_reply, "WELCOME_SECONDS", 0.5)
    monkeypatch.setattr(request_reply, "WELCOME_WARNING_SECONDS", 0.1)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    async with pretended_master() as (_, endpoint):
        end = reply_channel(endpoint, 0)
        with pytest.raises(PeerLost, match="has not replied for"):
            await asyncio.wait_for(end.receive(), 30)
        await end.close()
    assert "waiting for the master at" in caplog.text


async def test_a_forged_identity_is_rejected_and_changes_nothing(caplog):
    """Neither the name of a worker nor the credential of a replaced one suffices."""
    async with master() as m, worker(m, 0, joins=2):
        await m.wait_for({0}, patience=30)
        for forged in ({"joins": 1}, {"joins": 3, "secret": OTHER_SECRET}):
            stranger = reply_channel(m.endpoint, 0, **forged)
            stranger.notify(News("last"))
            with pytest.raises(PeerLost, match="are refused"):
                await asyncio.wait_for(stranger.receive(), 30)
            await stranger.close()
            assert (await m.call(0, Double(2), Answer, timeout=30)).value == 4
        assert "another process has taken its place" in caplog.text
        assert "'model_worker/0' with a credential of another run" in caplog.text
        assert m.notices == []
