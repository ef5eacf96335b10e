"""The stream over real sockets and processes: exactly once, paced by credit, hard to upset."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec
import numpy as np
import pytest
import zmq

from streamrl.errors import PeerLost, WireError
from streamrl.stream_dataset import StreamDataset
from streamrl.transport import codec
from streamrl.transport.puller import GroupPuller
from streamrl.transport.push_pull import UNREADABLE, Ask, GroupPusher, Reply
from streamrl.transport.session import Frame, Packet
from streamrl.transport.sockets import FramePacker
from streamrl.types import SampleMeta, TrajectoryGroup
from tests import hostile
from tests.credentials import OTHER_SECRET, LeasedPusher, credential_of, keys_of, peer_at, permit_for
from tests.groups import held, make_group

LIMIT = 1 << 20
DEADLINE = 30.0


class Head:
    """A data set with its ingress, and events for what a test waits for."""

    def __init__(
        self,
        *,
        capacity: int = 100,
        silence: float = 30.0,
        keep: bool = True,
        encrypted: bool = False,
    ) -> None:
        self._changed = threading.Condition()
        self.stored: list[int] = []
        self.most_held = 0
        self._keep = keep
        self._closed = False
        self.dataset = StreamDataset(rank=0, capacity_groups=capacity, on_stored=self._on_stored)
        self.puller = GroupPuller(
            self.dataset,
            keys=keys_of("model_worker"),
            encrypted=encrypted,
            limits=codec.Limits(max_group_bytes=LIMIT, vocab_size=1000),
            silence_seconds=silence,
        )
        self.puller.start()

    def close(self) -> None:
        """Once or more; it must have lived until then."""
        if not self._closed:
            self._closed = True
            running = self.puller.running
            self.puller.close()
            assert running, "the ingress has failed"

    def _on_stored(self, meta: SampleMeta) -> None:
        with self._changed:
            self.stored.append(meta.seq)
            self.most_held = max(self.most_held, len(self.dataset))
            self._changed.notify_all()
        if not self._keep:
            self.dataset.discard([meta.seq], forget=False)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; looked at whenever a group was stored."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(condition, timeout=DEADLINE)

        assert await asyncio.to_thread(wait), f"still not so after {DEADLINE:.0f} s; stored: {self.stored}"


@contextmanager
def head(**arguments: object) -> Iterator[Head]:
    opened = Head(**arguments)  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.close()


@asynccontextmanager
async def pusher_to(
    *heads: Head, worker: str = "rollout/0", beat: float = 2.0, warn: float = 30.0
) -> AsyncIterator[LeasedPusher]:
    endpoints = [opened.puller.endpoint for opened in heads]
    pusher = LeasedPusher(
        worker=worker, endpoints=endpoints, max_group_bytes=LIMIT, beat_seconds=beat, warn_seconds=warn
    )
    try:
        yield pusher
    finally:
        await pusher.close()


class RawPeer:
    """A pusher that sends any packet, and numbers its messages only."""

    def __init__(self, opened: Head, routing_id: bytes) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.set(zmq.ROUTING_ID, routing_id)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVTIMEO, int(DEADLINE * 1000))
        self.socket.connect(opened.puller.endpoint)
        self.sent = 0

    def send(self, message: Frame, *frames: Frame) -> None:
        self.sent += 1
        packet = msgspec.msgpack.encode(Packet(self.sent, 0, 0, None, msgspec.Raw(bytes(message))))
        self.socket.send_multipart([packet, *frames])

    def reply(self) -> Reply:
        """The next message."""
        while True:
            packet = msgspec.msgpack.decode(self.socket.recv(), type=Packet)
            if not packet.is_beat:
                return msgspec.msgpack.decode(packet.message, type=Reply)

    def reply_to(self, message: Frame, *frames: Frame) -> Reply:
        self.send(message, *frames)
        return self.reply()


@contextmanager
def raw_peer(opened: Head, *, number: int = 1) -> Iterator[RawPeer]:
    peer = RawPeer(opened, f"{credential_of('rollout', 0, to='model_worker', number=number).text} raw".encode())
    with peer.socket:
        yield peer


async def all_of(*pushes: object) -> None:
    async with asyncio.timeout(DEADLINE):
        await asyncio.gather(*pushes)  # type: ignore[call-overload]


@pytest.mark.parametrize("encrypted", [False, True])
async def test_groups_reach_the_head_of_their_seq_as_they_were(encrypted: bool) -> None:
    with head(encrypted=encrypted) as even, head(encrypted=encrypted) as odd:
        assert even.puller.endpoint.startswith("curve://" if encrypted else "tcp://")
        async with pusher_to(even, odd) as pusher:
            await all_of(*(pusher.push(make_group(seq, version=seq)) for seq in range(20)))
        assert sorted(even.stored) == list(range(0, 20, 2))
        assert sorted(odd.stored) == list(range(1, 20, 2))
        group = odd.dataset.find(7)
        assert group is not None
        sent = make_group(7, version=7)
        for name in codec.ARRAYS:
            np.testing.assert_array_equal(getattr(group, name), getattr(sent, name))


async def test_a_group_known_to_the_head_is_acknowledged_and_not_stored_again() -> None:
    with head() as opened:
        async with pusher_to(opened) as one, pusher_to(opened, worker="rollout/1") as other:
            await all_of(one.push(make_group(3)))
            opened.dataset.discard([3], forget=False)
            await all_of(other.push(make_group(3)), one.push(make_group(3)), one.push(make_group(3)))
            assert opened.stored == [3]
            await all_of(other.push(make_group(4)))
            opened.dataset.discard([4], forget=True)
            await all_of(one.push(make_group(4)))
        assert opened.stored == [3, 4, 4]


class Warnings(logging.Handler):
    """Keeps messages, and says when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.some = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.some.set()


async def test_a_group_is_acknowledged_only_once_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first the head finds no place for it, though there seemed to be one."""
    with head() as opened:
        no_place, offer = iter([True]), opened.dataset.offer
        monkeypatch.setattr(opened.dataset, "offer", lambda group: not next(no_place, False) and offer(group))
        async with pusher_to(opened) as pusher:
            await all_of(pusher.push(make_group(0)))
            assert held(opened.dataset) == [0]
        assert next(no_place, None) is None


async def test_a_full_head_makes_pushers_wait_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = Warnings()
    monkeypatch.setattr(logging.getLogger("streamrl.transport.push_pull"), "handlers", [warnings])
    with head(capacity=4) as opened:
        async with pusher_to(opened, warn=0.05) as one, pusher_to(opened, worker="rollout/1") as other:
            pushes = [asyncio.ensure_future((one, other)[seq % 2].push(make_group(seq))) for seq in range(24)]
            for done in range(4, 28, 4):
                await opened.wait_for(lambda done=done: len(opened.stored) == done)  # type: ignore[misc]
                if done == 4:
                    async with asyncio.timeout(DEADLINE):
                        await warnings.some.wait()
                    assert sum(push.done() for push in pushes) <= 4
                assert len(opened.dataset) == 4
                opened.dataset.discard(held(opened.dataset), forget=False)
            await all_of(*pushes)
        assert sorted(opened.stored) == list(range(24))
        assert opened.most_held <= 4
        (first, *_) = warnings.messages
        assert re.match(r"rollout/\d waits for credit of trainer head 0 .*: 4 of 4 places taken there, ", first)


async def test_a_trainer_that_waits_for_seqs_in_order_gets_them_from_any_pusher() -> None:
    """`over_age = "wait"`: no more groups are alive than the head has places, and none may hoard credit."""
    batch, alive, total = 2, 6, 60
    shuffled = random.Random(0)
    with head(capacity=alive) as opened:
        async with pusher_to(opened) as a, pusher_to(opened) as b, pusher_to(opened) as c:
            pushes: list[asyncio.Future[None]] = []
            admitted = 0
            for trained in range(0, total, batch):
                fresh = list(range(admitted, min(total, trained + alive)))
                admitted += len(fresh)
                shuffled.shuffle(fresh)
                pushes += [asyncio.ensure_future(shuffled.choice((a, b, c)).push(make_group(s))) for s in fresh]
                wanted = [trained, trained + 1]
                await opened.wait_for(lambda wanted=wanted: set(wanted) <= set(opened.stored))  # type: ignore[misc]
                opened.dataset.discard(wanted, forget=False)
            await all_of(*pushes)
        assert sorted(opened.stored) == list(range(total))
        assert opened.most_held <= alive


async def test_a_refused_group_raises_at_the_pusher_and_the_stream_goes_on() -> None:
    with head() as opened:
        async with pusher_to(opened, worker="rollout/5") as pusher:
            bad = make_group(1)
            bad.packed_behavior_logprobs[-1] = np.nan
            with pytest.raises(WireError, match=r"group 1 from rollout/5: behavior_logprobs"):
                await all_of(pusher.push(bad))
            with pytest.raises(WireError, match="group_mb"):
                await all_of(pusher.push(make_group(2, seqlens=(100_000,))))
            await all_of(pusher.push(make_group(1)), pusher.push(make_group(3)))
        assert sorted(opened.stored) == [1, 3]
        assert opened.dataset.stats()["groups_refused_total"] == 1


def frames_of(group: TrajectoryGroup) -> list[Frame]:
    """With the permit of `rollout/0`."""
    return codec.encode(group, max_group_bytes=LIMIT, permit=permit_for(group.seq))


def ask(*offered: int, withdrawn: Sequence[int] = ()) -> bytes:
    return msgspec.msgpack.encode(Ask([(seq, permit_for(seq)) for seq in offered], list(withdrawn)))


HEADER = bytes(frames_of(make_group(1))[0])
TOGETHER = bytes(FramePacker().pack(frames_of(make_group(1))[1:])[0])
FRAMES = [getattr(make_group(1), name).tobytes() for name in codec.ARRAYS]


@pytest.mark.parametrize(
    ("frames", "seq", "says"),
    [
        ([msgspec.msgpack.encode("garbage"), *FRAMES], UNREADABLE, "neither an Ask nor a GroupHeader"),
        ([msgspec.msgpack.encode({"type": "ask", "offered": [[-1, ""]], "withdrawn": []})], UNREADABLE, ">= 0"),
        ([ask(*[0] * 5000)], UNREADABLE, "length"),
        ([HEADER, *FRAMES, b"more"], 1, "9 frames of "),
        ([HEADER, *FRAMES[:4], np.full(12, np.nan, np.float32).tobytes(), *FRAMES[5:]], 1, "finite"),
    ],
)
async def test_malformed_messages_are_refused_and_the_stream_goes_on(frames: list[Frame], seq: int, says: str) -> None:
    with head() as opened, raw_peer(opened) as peer:
        (refusal,) = peer.reply_to(*frames).refused
        assert refusal.seq == seq
        assert says in refusal.reason
        assert opened.dataset.stats()["groups_refused_total"] == 1
        assert peer.reply_to(HEADER, TOGETHER).stored == [1]
        assert opened.stored == [1]


ASK = ask(1, 2, withdrawn=[3])


async def test_no_message_ends_a_head(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it makes a decoder or a check raise: it is refused, and later messages are processed."""
    with head() as opened, raw_peer(opened) as peer:
        deep = [[hostile.with_unknown_field(valid), TOGETHER] for valid in (ASK, HEADER)]
        for message, *frames in (*deep, *hostile.messages([[ASK], [HEADER, TOGETHER], [HEADER, *FRAMES]], count=2000)):
            peer.send(message or b"\xc0", *frames)
            peer.sent -= 1
            peer.send(ask())  # ignored, unless the packet could not be decoded
        packets = [Packet(place, 2**40, 3, 7, msgspec.Raw(ASK)) for place in (1, peer.sent + 1, 2**61)]
        valid_packets = [[msgspec.msgpack.encode(packet), TOGETHER] for packet in packets]
        for frames in hostile.messages(valid_packets, count=1000):
            peer.socket.send_multipart(frames)
        with raw_peer(opened, number=2) as later:
            later.send(*frames_of(make_group(200)))
            async with pusher_to(opened, worker="rollout/1") as pusher:
                await all_of(*(pusher.push(make_group(seq)) for seq in range(100, 110)))
            await opened.wait_for(lambda: {200, *range(100, 110)} <= set(opened.stored))
        assert opened.dataset.stats()["groups_refused_total"] > 100
        assert "recursion" in caplog.text


async def test_what_cannot_have_been_admitted_is_refused_and_takes_no_place() -> None:
    with head(capacity=1) as opened, raw_peer(opened) as peer:
        opened.puller.expect(newest_version=4, seqs=100)
        forged = [make_group(10**12), make_group(100), make_group(7, version=10**6)]
        for group in forged:
            (refusal,) = peer.reply_to(*frames_of(group)).refused
            assert refusal.seq == group.seq
            assert "from rollout/0" in refusal.reason
        asked = peer.reply_to(ask(100, 10**12))
        assert [refusal.seq for refusal in asked.refused] == [100, 10**12]
        assert (asked.send, asked.taken) == ([], 0)
        opened.puller.expect(newest_version=5, seqs=101)
        assert peer.reply_to(*frames_of(make_group(100, version=5))).stored == [100]


async def test_a_cancelled_push_gives_its_turn_away() -> None:
    with head(capacity=1) as opened:
        async with pusher_to(opened) as pusher, pusher_to(opened, worker="rollout/1") as other:
            await all_of(pusher.push(make_group(0)))
            waiting = asyncio.ensure_future(pusher.push(make_group(1)))
            later = asyncio.ensure_future(other.push(make_group(2)))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert not later.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.sleep(0)  # the withdrawal leaves with this turn of the loop
            opened.dataset.discard([0], forget=False)
            await all_of(later)
            assert opened.stored == [0, 2]
            opened.dataset.discard([2], forget=False)
            await all_of(pusher.push(make_group(1)))
        assert opened.stored == [0, 2, 1]


async def test_closing_ends_what_waits() -> None:
    with head(capacity=1) as opened:
        async with pusher_to(opened) as pusher:
            await all_of(pusher.push(make_group(0)))
            waiting = asyncio.ensure_future(pusher.push(make_group(1)))
            await asyncio.sleep(0)
        with pytest.raises(PeerLost, match=r"group 1: the pusher was closed before trainer head 0"):
            await waiting
        with pytest.raises(PeerLost, match="the pusher is closed"):
            await pusher.push(make_group(2))


async def test_credit_of_a_silent_sender_goes_to_others() -> None:
    with head(capacity=1, silence=0.3) as opened, raw_peer(opened) as silent:
        reply = silent.reply_to(ask(0))
        assert reply.send == [0]
        async with pusher_to(opened, worker="rollout/1", beat=0.1) as pusher:
            await all_of(pusher.push(make_group(1)))
        assert opened.stored == [1]
        # A group that comes after all finds no place; it is not stored, and not lost either.
        late = silent.reply_to(*frames_of(make_group(0)))
        assert (late.stored, late.refused, late.offer_again) == ([], [], True)
        opened.dataset.discard([1], forget=False)
        assert silent.reply().send == [0]


async def test_a_pusher_whose_offers_were_forgotten_offers_its_groups_again() -> None:
    with head(capacity=1, silence=0.2) as opened:
        async with pusher_to(opened) as pusher:  # beats too seldom
            await all_of(pusher.push(make_group(0)))
            waiting = asyncio.ensure_future(pusher.push(make_group(1)))
            await asyncio.sleep(0.5)
            opened.dataset.discard([0], forget=False)
            await all_of(waiting)
        assert opened.stored == [0, 1]


async def test_every_group_arrives_once_though_packets_of_the_head_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(1)
    with head(capacity=8, keep=False) as opened:
        server = opened.puller._server
        send = server._send
        monkeypatch.setattr(server, "_send", lambda *packet: dice.random() < 0.4 or send(*packet))
        async with pusher_to(opened, beat=0.05) as one, pusher_to(opened, worker="rollout/1", beat=0.05) as other:
            mine = [one.push(make_group(seq)) for seq in range(0, 60)]
            theirs = [other.push(make_group(seq)) for seq in range(40, 100)]  # 20 are made twice
            await all_of(*mine, *theirs)
        assert sorted(opened.stored) == list(range(100))
        assert opened.most_held <= 8


PUSH_FOR_EVER = """
import asyncio, itertools, sys
from tests.credentials import LeasedPusher
from tests.groups import make_group

async def main():
    pusher = LeasedPusher(worker="rollout/0", endpoints=[sys.argv[1]], max_group_bytes=1 << 20)
    seqs = itertools.count()
    async def push_some():
        for seq in seqs:
            await pusher.push(make_group(seq, seqlens=(15_000, 15_000)))
    await asyncio.gather(*(push_some() for _ in range(16)))

asyncio.run(main())
"""


async def test_a_pusher_killed_in_mid_stream_costs_neither_groups_nor_places() -> None:
    with head(capacity=8, silence=0.5) as opened:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PUSH_FOR_EVER, opened.puller.endpoint)
        try:
            await opened.wait_for(lambda: len(opened.stored) == 8)
            for _ in range(5):
                seen = len(opened.stored)
                opened.dataset.discard(held(opened.dataset), forget=False)
                await opened.wait_for(lambda seen=seen: len(opened.stored) > seen)  # type: ignore[misc]
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        redone = range(max(opened.stored) + 20)
        async with pusher_to(opened, worker="rollout/1", beat=0.1) as pusher:
            pushes = asyncio.gather(*(pusher.push(make_group(seq)) for seq in redone))
            while not pushes.done():
                opened.dataset.discard(held(opened.dataset), forget=False)
                await asyncio.wait([pushes], timeout=0.02)
            await pushes
        assert sorted(opened.stored) == list(redone)
        assert opened.most_held <= 8


async def test_a_rejected_pusher_fails_its_groups() -> None:
    with head() as opened:
        credential = credential_of("rollout", 0, to="model_worker", secret=OTHER_SECRET)
        pusher = GroupPusher(
            worker="rollout/0", heads=[peer_at(opened.puller.endpoint)], credential=credential, max_group_bytes=LIMIT
        )
        for seq in (1, 2):
            with pytest.raises(WireError, match=f"group {seq}: trainer head 0 .* of another run"):
                await all_of(pusher.push(make_group(seq), permit=permit_for(seq)))
        await pusher.close()
        assert opened.stored == []


async def test_a_group_that_was_leased_to_nobody_or_to_another_is_refused_by_name() -> None:
    with head(capacity=2) as opened, raw_peer(opened) as peer:
        for permit in ("", "0" * 32, permit_for(8), permit_for(7, "rollout/1")):
            (refusal,) = peer.reply_to(*codec.encode(make_group(7), max_group_bytes=LIMIT, permit=permit)).refused
            assert (refusal.seq, refusal.reason) == (7, "group 7 was not leased to rollout/0")
            asked = msgspec.msgpack.encode(Ask(offered=[(7, permit), (8, permit)], withdrawn=[]))
            assert 7 in [refusal.seq for refusal in peer.reply_to(asked).refused]
        other = msgspec.structs.replace(make_group(7), worker="rollout/1")
        (refusal,) = peer.reply_to(*frames_of(other)).refused
        assert refusal.reason == "group 7 of 'rollout/1' comes from rollout/0"
        assert opened.stored == []
        assert peer.reply_to(*frames_of(make_group(7))).stored == [7]
