"""A session: numbered messages in both directions between the two ends of a ZMQ connection.

The stream of groups and the requests of the controller share this layer. Each message is processed once, in order, and
is sent again if it was lost. TCP keeps the order and ZMQ connects again by itself, so the lost messages are always the
last ones that were sent over a connection that broke. The receiving end detects the loss exactly, without a timeout: a
later packet has a place that does not follow. An end without messages sends *beats*, which carry the place of its last
message. A slow connection therefore causes no repetition: a beat arrives behind the messages that it follows.

`LastHeard` defines when a peer counts as silent, for all processes; the owner decides what follows.

Pure: `send` does the I/O, the owner decides when to send beats, and times in seconds are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec

Frame = bytes | memoryview
"""Contiguous bytes."""
COPIED_BELOW = 1 << 18
"""Below this many bytes a copy is cheaper than avoiding it: measured with benchmarks/bench_stream.py."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]

NO_MESSAGE = msgspec.Raw(b"\xc0")
"""`Packet.message` of a beat."""


class Packet(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first frame between two ends."""

    place: Count
    """Number of the message among all messages of this end, from 1; in a beat: of the last message."""
    processed: Count
    """This end has processed all messages of the other end up to this place."""
    attempt: Count
    """How often this end has sent its unconfirmed messages again."""
    lost: Count | None
    """The other end's `attempt`, if messages after `processed` that it sent in that attempt are lost."""
    message: msgspec.Raw = NO_MESSAGE

    @property
    def is_beat(self) -> bool:
        """Whether there is no message."""
        return bytes(self.message) == bytes(NO_MESSAGE)


class Rejection(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The reply to a sender whose messages are not accepted."""

    reason: str


class _Message(NamedTuple):
    body: msgspec.Raw
    frames: Sequence[Frame]


class MessageSession:
    """One end's state of the exchange."""

    def __init__(self, send: Callable[[Packet, Sequence[Frame]], object]) -> None:
        """`send` sends a packet and the frames that follow it; it may lose them."""
        self._send = send
        self.unconfirmed: dict[int, _Message] = {}
        """Sent messages that the other end may not have processed, by place, oldest first."""
        self._sent = 0
        self._processed = 0
        self._attempt = 0
        self._lost: int | None = None

    def send(self, body: bytes, frames: Sequence[Frame] = ()) -> None:
        """Send a message. `frames` must not change until the other end has confirmed it."""
        self._sent += 1
        message = self.unconfirmed[self._sent] = _Message(msgspec.Raw(body), frames)
        self._send_message(self._sent, message)

    def beat(self) -> None:
        """Send a sign of life, with the confirmation of all processed messages."""
        self._send(Packet(self._sent, self._processed, self._attempt, self._lost), ())

    def receive(self, packet: Packet) -> bool:
        """Return whether the message in `packet` is to be processed now. Send lost messages again, and report a loss
        to the other end."""
        while self.unconfirmed and (first := next(iter(self.unconfirmed))) <= packet.processed:
            del self.unconfirmed[first]
        if packet.lost == self._attempt:
            self._attempt += 1
            for place, message in self.unconfirmed.items():
                self._send_message(place, message)
        following = self._processed + 1
        if packet.place < following:
            if packet.place == self._processed:
                self._lost = None
            return False
        if packet.place == following and not packet.is_beat:
            self._processed, self._lost = following, None
            return True
        if self._lost != packet.attempt:
            self._lost = packet.attempt
            self.beat()
        return False

    def _send_message(self, place: int, message: _Message) -> None:
        self._send(Packet(place, self._processed, self._attempt, self._lost, message.body), message.frames)


class LastHeard:
    """Time of a peer's last message; the peer is silent after `patience` seconds without one."""

    __slots__ = ("at", "patience")

    def __init__(self, *, now: float, patience: float) -> None:
        self.at = now
        """Time of the last message."""
        self.patience = patience

    def hear(self, *, now: float) -> None:
        """Note a message of the peer."""
        self.at = now

    @property
    def silent_at(self) -> float:
        """When it becomes silent if no message arrives before."""
        return self.at + self.patience

    def is_silent(self, *, now: float) -> bool:
        """Whether no message came for `patience` seconds."""
        return now >= self.silent_at

    def seconds(self, *, now: float) -> float:
        """Return the time since its last message."""
        return now - self.at

    def excuse(self, seconds: float) -> None:
        """Do not count the last `seconds` as silence: messages could not be received then."""
        self.at += seconds


def next_silence(peers: Iterable[LastHeard]) -> float | None:
    """Return when the first of `peers` becomes silent if no message arrives before; None if there are no peers."""
    return min((peer.silent_at for peer in peers), default=None)
