"""The request-reply channel over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time

import msgspec
import pytest
import zmq
import zmq.asyncio

from streamrl.errors import DeadlineExceeded, PeerError, PeerLost, WireError
from streamrl.transport import request_reply
from streamrl.transport.credentials import CurveKeys, Doorkeeper
from streamrl.transport.request_reply import ReplyChannel, RequestChannel, _Conversation
from tests import hostile
from tests.credentials import peer_at, shown_by, verifier_of
from tests.ipv6 import IPV6


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


def reply_channel(endpoint, number, call_type, *, joins=1):
    """`joins`: how many have joined the run so far."""
    shown = shown_by("model_worker", number, to="controller", number=joins)
    return ReplyChannel(master=peer_at(endpoint), worker=number, shown=shown, call_type=call_type)


@contextlib.asynccontextmanager
async def master(host="127.0.0.1"):
    notices: list[tuple[int, News]] = []
    heard = asyncio.Event()

    def hear(number, notice):
        notices.append((number, notice))
        if notice == News("last"):
            heard.set()

    channel = RequestChannel(host=host, notice_type=News, on_notice=hear)
    channel.notices, channel.heard = notices, heard
    channel.admit(verifier_of("controller"))
    try:
        yield channel
    finally:
        await channel.close()


@contextlib.asynccontextmanager
async def worker(channel, number):
    end = reply_channel(channel.endpoint, number, call_type=Double | Fail | Hang)
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
        await m.wait_for({0, 1}, patience=30)
        calls = [m.call(i % 2, Double(i), Answer, timeout=30) for i in range(50)]
        assert [a.value for a in await asyncio.gather(*calls)] == [2 * i for i in range(50)]


@IPV6
@pytest.mark.parametrize("host", ["::1", "::"])
async def test_a_master_may_have_an_ipv6_address(host):
    async with master(host) as m:
        m.endpoint = m.endpoint.replace("[::]", "[::1]")
        async with worker(m, 0):
            await m.wait_for({0}, patience=30)
            assert (await m.call(0, Double(2), Answer, timeout=30)).value == 4


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


async def test_no_worker_begins_a_request_that_another_does_not_have():
    async with master() as m, worker(m, 0) as a:
        await m.wait_for({0}, patience=30)
        with pytest.raises(DeadlineExceeded, match="model_worker/0, model_worker/1 did not finish Double"):
            await m.request({0: Double(1), 1: Double(1)}, Answer, timeout=0.5)
        assert a.begun == []


@pytest.mark.parametrize(
    "given_up", ["while it is sent", "before it is acknowledged", "by its deadline", "by both in one moment"]
)
async def test_a_request_that_is_given_up_before_it_begins_holds_nobody_up(given_up):
    async with master() as m, worker(m, 0) as first, reader_of_nothing(m, 1):
        await m.wait_for({0, 1}, patience=30)
        timeout = 0.2 if given_up.startswith("by") else 30
        together = asyncio.create_task(m.request({0: Double(1), 1: Double(2)}, Answer, timeout=timeout))
        if given_up == "by both in one moment":  # a busy machine: its deadline has passed, and nobody saw it yet
            asyncio.get_running_loop().call_later(0.1, time.sleep, 0.3)
        if given_up != "by its deadline":
            await asyncio.sleep(0 if given_up == "while it is sent" else 0.3)
            together.cancel()
        with pytest.raises(DeadlineExceeded if given_up == "by its deadline" else asyncio.CancelledError):
            await together
        assert (await m.call(0, Double(3), Answer, timeout=30)).value == 6
        assert first.begun == [Double(3)]
        assert not first._waiting


@contextlib.asynccontextmanager
async def reader_of_nothing(channel, number):
    """A worker that lives, and takes no call."""
    end = reply_channel(channel.endpoint, number, call_type=Double)
    try:
        yield end
    finally:
        await end.close()


async def test_a_call_that_waits_for_its_other_workers_says_so(monkeypatch, caplog):
    monkeypatch.setattr(request_reply, "BEGIN_WARNING_SECONDS", 0.1)
    async with master() as m, worker(m, 0), reader_of_nothing(m, 1):
        await m.wait_for({0, 1}, patience=30)
        with pytest.raises(DeadlineExceeded, match="model_worker/0, model_worker/1 did not finish Double"):
            await m.request({0: Double(1), 1: Double(2)}, Answer, timeout=0.5)
    assert "waits for its other workers to have it" in caplog.text


async def test_the_failure_of_one_worker_fails_the_request_at_once():
    async with master() as m, worker(m, 0), worker(m, 1):
        await m.wait_for({0, 1}, patience=30)
        with pytest.raises(PeerError, match="model_worker/1 failed in Hang: Traceback: it broke"):
            await m.request({0: Hang(), 1: Fail()}, Answer, timeout=30)


async def test_a_failure_arrives_with_its_traceback_and_the_worker_lives_on():
    async with master() as m, worker(m, 0):
        await m.wait_for({0}, patience=30)
        with pytest.raises(PeerError, match="model_worker/0 failed in Fail: Traceback: it broke"):
            await m.call(0, Fail(), Answer, timeout=30)
        assert (await m.call(0, Double(4), Answer, timeout=30)).value == 8


async def test_a_call_that_takes_too_long_is_named():
    async with master() as m, worker(m, 0):
        await m.wait_for({0}, patience=30)
        with pytest.raises(DeadlineExceeded, match="model_worker/0 did not finish Hang within 0 s"):
            await m.call(0, Hang(), Answer, timeout=0.1)


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
        async with worker(m, 0):
            with pytest.raises(PeerLost, match="model_worker/0 was started anew"):
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
        with pytest.raises(DeadlineExceeded, match="no word from model_worker/0, model_worker/1, nor within"):
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


async def test_notices_arrive_and_nonsense_is_passed_over():
    async with master() as m, worker(m, 0) as w:
        context = zmq.asyncio.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(m.endpoint)
        for junk in ([b"x"], [b"N", b"", b"\xff\xff"], [b"R", b"12345678", b""]):
            await stranger.send_multipart(junk)
        await w.notify(News("stored"))
        await m.wait_for({0}, patience=30)
        assert (await m.call(0, Double(1), Answer, timeout=30)).value == 2
        assert m.notices == [(0, News("stored"))]
        stranger.close()
        context.term()


NUMBER, ONE, TWO, THREE = (number.to_bytes(8, "big") for number in range(4))
START = bytes(range(16))
DOUBLE = msgspec.msgpack.encode(Double(3))
NEWS = msgspec.msgpack.encode(News("stored"))


async def test_no_message_ends_the_master():
    async with master() as m, worker(m, 0):
        await m.wait_for({0}, patience=30)
        context = zmq.asyncio.Context()
        proofs = [shown_by("model_worker", number, to="controller").credential for number in (70, 7)]
        for identity in (b"70", b"+1", b"0", proofs[0].encode() + b" x", b"9" * 200, proofs[1].encode() + b" x"):
            with context.socket(zmq.DEALER) as stranger:
                stranger.set(zmq.LINGER, 1000)
                stranger.set(zmq.IDENTITY, identity)
                stranger.connect(m.endpoint)
                await stranger.send_multipart([b"N", NUMBER, ONE, START, hostile.with_unknown_field(NEWS)])
                valid = [[kind, NUMBER, TWO, START, body] for kind in (b"R", b"E", b"A") for body in (NEWS, DOUBLE)]
                valid += [[b"H", NUMBER, NUMBER, START, b""], [b"N", NUMBER, THREE, START, NEWS]]
                for frames in hostile.messages(valid, count=300):
                    await stranger.send_multipart(frames)
                await stranger.send_multipart([b"H", NUMBER, NUMBER, START[::-1], b""])
                last = msgspec.msgpack.encode(News("last"))
                await stranger.send_multipart([b"N", NUMBER, ONE, START[::-1], last])
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
        name, _, _, _, start, _ = await router.recv_multipart()
        places = (place.to_bytes(8, "big") for place in itertools.count(1))
        await router.send_multipart([name, b"C", NUMBER, next(places), start, hostile.with_unknown_field(DOUBLE)])
        for kind in (b"P", b"W", b"S", b"S", b"W"):  # said twice, it is said once
            await router.send_multipart([name, kind, NUMBER, next(places), start, DOUBLE])
        valid = [[kind, NUMBER, NUMBER, start, DOUBLE] for kind in (b"C", b"P", b"S", b"W", b"B")]
        for frames in hostile.messages(valid, count=1000):
            await router.send_multipart([name, *frames])
        for _ in range(1000):  # one of them has the next place
            await router.send_multipart([name, b"C", NUMBER, next(places), start, msgspec.msgpack.encode(Double(4))])
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
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield router, f"tcp://127.0.0.1:{port}"
    context.term()


async def test_an_answer_that_cannot_be_decoded_fails_its_request_alone():
    async with master() as m:
        end = reply_channel(m.endpoint, 0, call_type=Double)
        await m.wait_for({0}, patience=30)
        asking = asyncio.create_task(m.call(0, Double(1), Answer, timeout=30))
        number, _ = await end.receive()
        await end._say(b"R", number, hostile.with_unknown_field(msgspec.msgpack.encode(Answer(2))))
        with pytest.raises(WireError, match=r"Double was answered with something else: .*recursion"):
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


async def test_every_notice_arrives_once_and_in_order_though_connections_break(monkeypatch):
    """Also those that the worker's own end had sent when the connection broke."""
    monkeypatch.setattr(request_reply, "RESEND_SECONDS", 0.1)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.05)
    line = Line()
    async with master() as m:
        end = reply_channel(await line.open(m.endpoint), 0, call_type=Double)
        serving = asyncio.create_task(serve(end, []))
        await m.wait_for({0}, patience=30)
        said = []
        for round_ in range(4):
            await end.notify(News(f"{round_} arrives"))
            await asyncio.sleep(0.1)
            line.swallows = "worker"
            for number in range(3):
                await end.notify(News(f"{round_} is lost {number}"))
            await until(lambda: line.lost)
            await asyncio.sleep(0.1)
            line.cut()
            line.swallows, line.lost = None, 0
            await end.notify(News(f"{round_} after"))
            said += [f"{round_} arrives", *(f"{round_} is lost {number}" for number in range(3)), f"{round_} after"]
        await until(lambda: len(m.notices) >= len(said) and not end._conversation.unconfirmed)
        assert [notice.text for _, notice in m.notices] == said
        assert line.connections == 5
        assert (await m.call(0, Double(1), Answer, timeout=30)).value == 2
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await end.close()
        await line.close()


@pytest.mark.parametrize(
    ("whose", "kind"),
    [("master", b"P"), ("worker", b"A"), ("master", b"S"), ("worker", b"R"), ("worker", b"E")],
    ids=["call", "acknowledgement", "beginning", "reply", "error"],
)
async def test_a_request_goes_on_though_a_connection_breaks_with_part_of_it(whose, kind, monkeypatch):
    """ZMQ connects again within moments, and neither end is told."""
    monkeypatch.setattr(request_reply, "RESEND_SECONDS", 0.1)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.05)
    line = Line()
    call = Fail() if kind == b"E" else Double(1)
    async with master() as m, worker(m, 1) as other:
        end = reply_channel(await line.open(m.endpoint), 0, call_type=Double | Fail | Hang)
        begun = []
        serving = asyncio.create_task(serve(end, begun))
        await m.wait_for({0, 1}, patience=30)
        say, speaker = _Conversation.say, m._conversations[0] if whose == "master" else end._conversation

        def swallowed(conversation, said, number, body):
            if conversation is speaker and said == kind:
                line.swallows = whose
            return say(conversation, said, number, body)

        monkeypatch.setattr(_Conversation, "say", swallowed)
        asking = asyncio.create_task(m.request({0: call, 1: call}, Answer, timeout=30))
        await until(lambda: line.lost)
        monkeypatch.setattr(_Conversation, "say", say)
        line.cut()
        line.swallows = None
        if kind == b"E":
            with pytest.raises(PeerError, match="it broke"):
                await asking
        else:
            assert await asking == {0: Answer(2), 1: Answer(2)}
        assert (begun, other.begun) == ([call], [call]), "each was carried out once"
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await end.close()
        await line.close()


async def test_notices_of_a_worker_that_was_started_anew_are_heard_from_its_first_one_on():
    async with master() as m:
        for start in ("first", "second"):
            async with worker(m, 0) as end:
                await end.notify(News(start))
                await until(lambda: not end._conversation.unconfirmed)
        assert [notice.text for _, notice in m.notices] == ["first", "second"]


async def test_an_answer_of_another_type_is_refused():
    async with master() as m, worker(m, 0):
        await m.wait_for({0}, patience=30)
        with pytest.raises(WireError, match="Double was answered with something else"):
            await m.call(0, Double(1), News, timeout=5)


@pytest.mark.parametrize("known_from", [2, math.inf])
async def test_a_worker_that_is_turned_away_connects_again_and_gives_up_in_the_end(known_from, monkeypatch, caplog):
    """ZMQ itself does not, once the doorkeeper has refused a key. `known_from`: the first time that it is known."""
    monkeypatch.setattr(request_reply, "CONNECT_AGAIN_SECONDS", 0.3)
    monkeypatch.setattr(request_reply, "WELCOME_SECONDS", 60.0 if known_from < math.inf else 1.0)
    monkeypatch.setattr(request_reply, "BEAT_SECONDS", 0.1)
    masters, mine = CurveKeys.make(), CurveKeys.make()
    knocked = []

    async def is_member(key):
        knocked.append(key)
        return len(knocked) >= known_from

    channel = RequestChannel(host="127.0.0.1", notice_type=News, on_notice=lambda *_: None, keys=masters)
    channel.admit(verifier_of("controller", encrypted=True))
    doorkeeper = Doorkeeper(channel.context, is_member)
    doorkeeper.start()
    end = ReplyChannel(
        master=peer_at(channel.endpoint, curve_key=masters.public),
        worker=0,
        shown=shown_by("model_worker", 0, to="controller", keys=mine),
        call_type=Double,
    )
    serving = asyncio.create_task(serve(end, []))
    try:
        if known_from < math.inf:
            await channel.wait_for({0}, patience=30)
            assert (await channel.call(0, Double(2), Answer, timeout=30)).value == 4
            assert "connecting again" in caplog.text
        else:
            async with asyncio.timeout(30):
                with pytest.raises(ExceptionGroup) as lost:
                    await serving
            assert lost.group_contains(PeerLost, match="has not answered for .* turns this process away")
        assert set(knocked) == {mine.public}
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await end.close()
        doorkeeper.stop()
        await channel.close()


async def test_a_forged_identity_takes_nobodys_place(caplog):
    """Neither by the name of a worker nor with the credential of one that has been replaced."""
    async with master() as m, worker(m, 0):
        await m.wait_for({0}, patience=30)
        context = zmq.asyncio.Context()
        wrong_key = shown_by("model_worker", 0, to="controller", key=b"x" * 32)
        forged = (b"0", b"model_worker/0", wrong_key.credential.encode())
        for identity in (*forged, shown_by("model_worker", 0, to="model_worker").credential.encode() + b" x"):
            with context.socket(zmq.DEALER) as stranger:
                stranger.set(zmq.LINGER, 1000)
                stranger.set(zmq.IDENTITY, identity)
                stranger.connect(m.endpoint)
                await stranger.send_multipart([b"H", NUMBER, START])
                await stranger.send_multipart([b"N", ONE, START + NEWS])
                await asyncio.sleep(0.1)
                assert (await m.call(0, Double(2), Answer, timeout=30)).value == 4
        assert "the master refused a message of somebody who says that he is 'model_worker/0'" in caplog.text
        assert m.notices == []
        old = reply_channel(m.endpoint, 0, Double, joins=1)
        new = reply_channel(m.endpoint, 0, Double, joins=2)
        serving = asyncio.create_task(serve(new, []))
        async with asyncio.timeout(30):
            while not any(b" 2 - " in route for route in m._routes.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await old.notify(News("last"))
        assert (await m.call(0, Double(3), Answer, timeout=30)).value == 6
        assert m.notices == []
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await old.close()
        await new.close()
        context.term()
