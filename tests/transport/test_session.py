"""Sessions over a connection that breaks at any moment: each message is processed once, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from streamrl.transport.session import Frame, MessageSession, Packet

ends = st.sampled_from([0, 1])
encode = msgspec.msgpack.encode


class Connection(RuleBasedStateMachine):
    """Two sessions; packets arrive in order until the connection breaks, which loses those that are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[deque[tuple[Packet, Sequence[Frame]]]] = [deque(), deque()]
        self.sessions = [MessageSession(self.sender(end)) for end in (0, 1)]
        self.sent: list[list[int]] = [[], []]
        self.processed: list[list[int]] = [[], []]

    def sender(self, end: int):
        return lambda packet, frames: self.under_way[end].append((packet, frames))

    @rule(end=ends)
    def send(self, end: int) -> None:
        number = len(self.sent[end])
        self.sent[end].append(number)
        self.sessions[end].send(encode(number), [b"%d" % number])

    @rule(end=ends)
    def beat(self, end: int) -> None:
        self.sessions[end].beat()

    @precondition(lambda self: any(self.under_way))
    @rule(end=ends)
    def arrive(self, end: int) -> None:
        """The first packet that `end` sent and that has not arrived reaches the other end."""
        if self.under_way[end]:
            packet, frames = self.under_way[end].popleft()
            packet = msgspec.msgpack.decode(encode(packet), type=Packet)
            if self.sessions[1 - end].receive(packet):
                number = msgspec.msgpack.decode(packet.message)
                assert frames == [b"%d" % number]
                self.processed[end].append(number)

    @rule(kept=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def break_off(self, kept: tuple[int, int]) -> None:
        """The first packets had arrived at the other machine, and are read there; the others are lost."""
        for end in (0, 1):
            while len(self.under_way[end]) > kept[end]:
                self.under_way[end].pop()

    def drain(self) -> None:
        while any(self.under_way):
            for end in (0, 1):
                self.arrive(end)

    def teardown(self) -> None:
        for _ in range(3):  # one to detect a loss at either end, one to confirm
            self.beat(0)
            self.beat(1)
            self.drain()
        assert self.processed == self.sent
        assert not any(session.unconfirmed for session in self.sessions)


TestSession = Connection.TestCase


def test_a_slow_connection_causes_no_repetition() -> None:
    sent: list[Packet] = []
    session = MessageSession(lambda packet, _: sent.append(packet))
    other = MessageSession(lambda packet, _: None)
    for number in range(3):
        session.send(encode(number))
        session.beat()
    assert [other.receive(packet) for packet in sent] == [True, False] * 3
    assert len(sent) == 6


def test_a_loss_is_repaired_once_though_several_packets_show_it() -> None:
    sent: list[Packet] = []
    replies: list[Packet] = []
    session = MessageSession(lambda packet, _: sent.append(packet))
    other = MessageSession(lambda packet, _: replies.append(packet))
    for number in range(4):
        session.send(encode(number))
    for packet in sent[1:]:  # the first one is lost
        assert not other.receive(packet)
    assert len(replies) == 1
    sent.clear()
    session.receive(replies[0])
    session.receive(replies[0])
    assert [packet.place for packet in sent] == [1, 2, 3, 4]
    assert all(map(other.receive, sent))


def test_a_message_that_arrives_again_is_not_processed_again() -> None:
    sent: list[Packet] = []
    session = MessageSession(lambda packet, _: sent.append(packet))
    other = MessageSession(lambda packet, _: None)
    for number in range(2):
        session.send(encode(number))
    assert [other.receive(packet) for packet in [*sent, *sent]] == [True, True, False, False]
