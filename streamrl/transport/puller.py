"""The receiving end of the stream, at a DP head: one thread that waits, decodes, stores and replies.

`GroupPuller` owns the socket, its thread and the credit book; `push_pull.py` describes the protocol. The thread does
not depend on an event loop, so groups are received while the model worker computes. Invariants: a group is acknowledged
only after the sink has it; a message that breaks the wire format is rejected with a reason and changes nothing else.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec
import zmq

from streamrl import essential
from streamrl.errors import WireError
from streamrl.rate_limited_log import RateLimitedLog
from streamrl.transport import codec
from streamrl.transport.credentials import Identity, ReceiverKeys
from streamrl.transport.credit import CreditBook
from streamrl.transport.push_pull import UNREADABLE, Ask, Refusal, Reply
from streamrl.transport.session import MessageSession
from streamrl.transport.sockets import Arrival, ServerSocket
from streamrl.types import TrajectoryGroup

log = logging.getLogger(__name__)

PACKETS_PER_BATCH = 64
BATCH_SECONDS = 0.005
"""Limits of one batch, in packets and time, after which a head sends acknowledgements and grants."""
SILENCE_SECONDS = 30.0
"""A pusher that is silent for this long loses its credit. A pusher with groups in hand sends a beat every
`push_pull.BEAT_SECONDS`."""
LONGEST_REASON = 1000
"""Maximum length of the reason for rejecting a message, in characters."""
PACKET_BYTES = codec.MAX_HEADER_BYTES + 100
"""Maximum size of a packet."""


class GroupSink(Protocol):
    """Where a `GroupPuller` puts groups; called from its thread."""

    capacity_groups: int

    def __len__(self) -> int:
        """Return the number of stored groups; only `offer` increases it."""

    def knows(self, seq: int) -> bool:
        """Whether `seq` was ever stored."""

    def offer(self, group: TrajectoryGroup) -> bool:
        """Store `group` unless its `seq` is known. Return False if no place is free for it."""

    def count_refused(self) -> None:
        """Count a message that broke the wire format."""

    def notify_freed(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called, in any thread, whenever places become free."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ask | codec.GroupHeader)


class _Sender:
    """A pusher that has sent something, from one socket."""

    def __init__(self, route: bytes, identity: Identity, session: MessageSession) -> None:
        self.route = route
        self.identity = identity
        self.session = session
        self.reply = Reply()
        """The reply that is sent at the end of this batch."""

    @property
    def name(self) -> str:
        return self.identity.name


class GroupPuller:
    """Receives groups and stores them in `sink`, from `start` to `close`."""

    def __init__(
        self,
        sink: GroupSink,
        *,
        keys: ReceiverKeys,
        host: str,
        port: int = 0,
        limits: codec.Limits,
        silence_seconds: float = SILENCE_SECONDS,
        announced: str = "",
        encrypted: bool = False,
    ) -> None:
        """`limits`: groups beyond them are rejected. `silence_seconds`: a pusher that is silent for this long loses its
        credit. The others: as in `ServerSocket`."""
        self._keys = keys
        self._limits = limits
        self._sink = sink
        self._book = CreditBook(capacity=sink.capacity_groups, silence_seconds=silence_seconds)
        self._senders: dict[bytes, _Sender] = {}
        self._heard: dict[bytes, _Sender] = {}
        """Pushers to which a reply is due."""
        self._warnings = RateLimitedLog(log)
        self._closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._server = ServerSocket(
            keys,
            host=host,
            port=port,
            announced=announced,
            encrypted=encrypted,
            most_packet_bytes=PACKET_BYTES,
            most_frames=codec.MOST_FRAMES,
            most_bytes=limits.max_group_bytes,
        )
        self.endpoint = self._server.endpoint
        self._thread = essential.thread(self._run, name=f"the ingress at {self.endpoint}")

    @property
    def running(self) -> bool:
        """Whether groups are being received."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start receiving, in a thread whose failure ends the process."""
        self._sink.notify_freed(self._wake)
        self._thread.start()

    def expect(self, *, newest_version: int, seqs: int) -> None:
        """Accept groups that a policy up to `newest_version` sampled, with sequence numbers below `seqs`, from now on.
        Thread-safe."""
        self._limits = msgspec.structs.replace(self._limits, newest_version=newest_version, seqs=seqs)

    def close(self) -> None:
        """Stop the thread and close the socket; pushers keep unacknowledged groups."""
        self._sink.notify_freed(None)
        self._closing = True
        if self._thread.ident is None:
            self._release()
            return
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """Wake the thread because places became free, or because it is to stop. Thread-safe."""
        with suppress(OSError):  # enough wake-ups are pending already, or the socket is closed
            self._wake_sender.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._release()

    def _release(self) -> None:
        self._server.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        while not self._closing:
            for ready, _ in poller.poll(self._until_next_silence()):
                if ready is not self._server.socket:
                    self._wake_receiver.recv(4096)
            self._receive_batch()
            self._forget_silent()
            for route, seq in self._book.grant(stored=len(self._sink)):
                self._reply(route).send.append(seq)
            self._send_replies()

    def _until_next_silence(self) -> int | None:
        """Return the milliseconds until the next sender becomes silent; None if there are no senders."""
        due = self._book.next_silence()
        return None if due is None else max(0, int((due - time.monotonic()) * 1000) + 1)

    def _receive_batch(self) -> None:
        """Handle the packets that have arrived, one batch at most."""
        end = time.monotonic() + BATCH_SECONDS
        for _ in range(PACKETS_PER_BATCH):
            arrival = self._server.receive()
            if arrival is None:
                return
            now = time.monotonic()
            sender = self._sender(arrival)
            if self._book.hear(sender.route, now=now):
                sender.reply.offer_again = True
            if sender.session.receive(arrival.packet):
                self._handle(sender, arrival)
            if now > end:
                return

    def _sender(self, arrival: Arrival) -> _Sender:
        sender = self._senders.get(arrival.route)
        if sender is None:
            session = MessageSession(partial(self._server.send, arrival.route))
            sender = self._senders[arrival.route] = _Sender(arrival.route, arrival.sender, session)
        self._heard[arrival.route] = sender
        return sender

    def _reply(self, route: bytes) -> Reply:
        """Return the reply that is due to the pusher with this route."""
        sender = self._heard[route] = self._senders[route]
        return sender.reply

    def _handle(self, sender: _Sender, arrival: Arrival) -> None:
        try:
            message = _decoder.decode(arrival.packet.message)
        except Exception as error:  # tolerance point: no message may end the stream, whichever error it causes
            reason = f"a message that is neither an Ask nor a GroupHeader: {error or type(error).__name__}"
            self._refuse(sender, UNREADABLE, reason)
            return
        if isinstance(message, Ask):
            self._handle_ask(sender, message)
            return
        try:
            if arrival.excess:
                raise WireError(f"group {message.seq} from {sender.name}: {arrival.excess}")
            self._handle_group(sender, message, arrival.frames)
        except Exception as error:  # tolerance point: see above
            self._book.withdraw(sender.route, message.seq)
            self._refuse(sender, message.seq, str(error) or type(error).__name__)

    def _handle_ask(self, sender: _Sender, ask: Ask) -> None:
        for seq in ask.withdrawn:
            self._book.withdraw(sender.route, seq)
        if len(ask.permits) != len(ask.offered):
            self._refuse(sender, UNREADABLE, f"{len(ask.permits)} permits for {len(ask.offered)} groups")
            return
        for seq, permit in zip(ask.offered, ask.permits, strict=True):
            try:
                self._check_lease(sender, seq, permit)
                self._limits.check_seq(seq, where=f"group {seq} from {sender.name}")
            except WireError as error:
                self._refuse(sender, seq, str(error))
                continue
            if self._sink.knows(seq):
                sender.reply.stored.append(seq)
            elif self._book.offer(sender.route, seq):
                sender.reply.send.append(seq)

    def _handle_group(self, sender: _Sender, header: codec.GroupHeader, frames: list[memoryview]) -> None:
        """Store a group, or note it as offered if there is no place for it. Raises `WireError`."""
        self._check_lease(sender, header.seq, header.permit)
        if header.worker != sender.name:
            raise WireError(f"group {header.seq} of {header.worker[:40]!r} comes from {sender.name}")
        group = codec.decode(header, frames, limits=self._limits, sender=sender.name)
        full = not self._book.admits(group.seq, stored=len(self._sink)) and not self._sink.knows(group.seq)
        if full or not self._sink.offer(group):
            self._book.offer(sender.route, group.seq)  # not offered before, or its reservation had expired
            return
        for route in (sender.route, *self._book.note_stored(group.seq)):
            self._reply(route).stored.append(group.seq)

    def _check_lease(self, sender: _Sender, seq: int, permit: str) -> None:
        if not self._keys.permits(seq, sender.name, permit):
            raise WireError(f"group {seq} was not leased to {sender.name}")

    def _refuse(self, sender: _Sender, seq: int, reason: str) -> None:
        self._sink.count_refused()
        reason = reason[:LONGEST_REASON]  # it may quote the message
        self._warnings.warning("refused a message from %s: %s", sender.name, reason)
        sender.reply.refused.append(Refusal(seq, reason))

    def _forget_silent(self) -> None:
        now = time.monotonic()
        due = self._book.next_silence()
        if due is None or now < due:
            return
        for route, places in self._book.forget_silent(now=now).items():
            sender = self._senders[route]
            if places:
                log.warning(
                    "%s was granted %d places and has been silent for %.0f s: others may have them",
                    *(sender.name, places, self._book.silence_seconds),
                )
            if sender.identity.superseded:
                del self._senders[route]

    def _send_replies(self) -> None:
        """Send each pusher that has sent something one message with all news for it; if there is none, a beat."""
        stored = len(self._sink)
        taken, capacity = stored + self._book.reserved, self._book.capacity
        eager = self._book.eager(stored=stored)
        for sender in self._heard.values():
            reply = sender.reply
            if not (reply.send or reply.stored or reply.refused or reply.offer_again):
                sender.session.beat()
                continue
            reply.taken, reply.capacity, reply.eager = taken, capacity, eager
            sender.session.send(_encoder.encode(reply))
            sender.reply = Reply()
        self._heard.clear()
