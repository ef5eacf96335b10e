"""The receiving end of the stream, at a DP head: one thread that waits, decodes, stores and replies.

`GroupPuller` owns the socket, its thread and the credit book; `push_pull.py` describes the protocol. The thread does
not depend on an event loop, so groups are received while the model worker computes. Invariants: a group is acknowledged
only after the sink has it; a message that breaks the wire format is rejected with a reason and changes nothing else.
"""

from __future__ import annotations

import heapq
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import msgspec
import zmq

from streamrl import essential
from streamrl.errors import WireError
from streamrl.records.logs import RateLimitedLog
from streamrl.transport import codec
from streamrl.transport.addresses import LOOPBACK, Reach
from streamrl.transport.credentials import Identity, ReceiverKeys
from streamrl.transport.push_pull import UNREADABLE, Ask, Refusal, Reply
from streamrl.transport.session import LastHeard, next_silence
from streamrl.transport.sockets import Arrival, Connection, ServerSocket
from streamrl.types import TrajectoryGroup

Sender = TypeVar("Sender")


class CreditBook(Generic[Sender]):
    """Credit of the stream: which sender may send which group to a head. Pure; times are in seconds.

    A credit is a place reserved for one sequence number that a sender has offered. Stored and reserved groups together
    never exceed the capacity. Three consequences:

    - credits are never hoarded: a sender without groups has no credit. With `over_age = "wait"` and a capacity of
      (η + 1) · P, the maximum number of groups alive at once, every group in hand gets its place at once with any
      number of senders: the stream cannot deadlock;
    - when places are short, the lowest sequence number goes first, from any sender: this is the order in which batches
      need groups, and no sender starves another;
    - a sender that stays silent for `silence_seconds` loses its reservations and its turn.

    While there is room to spare, offering first would waste a round trip: `eager` is the number of groups that each
    sender may have in flight without offering them first. It reserves nothing, so it takes no place from any sender. If
    such a group finds no free place, it queues as if it had been offered.
    """

    def __init__(self, *, capacity: int, silence_seconds: float) -> None:
        self.capacity = capacity
        self.silence_seconds = silence_seconds
        self._reserved: dict[int, Sender] = {}
        self._waiting: dict[int, dict[Sender, None]] = {}
        self._order: list[int] = []  # heap: every seq that waits without reservation, possibly others
        self._ordered: set[int] = set()  # members of the heap
        self._heard: dict[Sender, LastHeard] = {}

    @property
    def reserved(self) -> int:
        """Places reserved for groups that have not arrived yet."""
        return len(self._reserved)

    @property
    def waiting(self) -> int:
        """Sequence numbers that were offered and have no place yet."""
        return sum(1 for seq in self._waiting if seq not in self._reserved)

    def eager(self, *, stored: int) -> int:
        """Return how many groups each sender may have in flight without an offer: its share of half the free places.

        `stored`: groups at the head now."""
        if self._waiting:
            return 0
        return (self.capacity - stored - len(self._reserved)) // (2 * max(1, len(self._heard)))

    def hear(self, sender: Sender, *, now: float) -> bool:
        """Note a message of `sender`; return whether it was unknown or silent, so that none of its offers is noted."""
        if sender in self._heard:
            self._heard[sender].hear(now=now)
            return False
        self._heard[sender] = LastHeard(now=now, patience=self.silence_seconds)
        return True

    def offer(self, sender: Sender, seq: int) -> bool:
        """Note that `sender` has `seq` in hand; return whether a place is reserved for it already, so it may send."""
        if self._reserved.get(seq) == sender:
            return True
        self._waiting.setdefault(seq, {})[sender] = None
        self._queue(seq)
        return False

    def withdraw(self, sender: Sender, seq: int) -> None:
        """Forget the offer and the reservation: `sender` no longer has `seq`, or its group was refused."""
        if self._reserved.get(seq) == sender:
            self._release(seq)
        waiters = self._waiting.get(seq)
        if waiters is not None:
            waiters.pop(sender, None)
            if not waiters:
                del self._waiting[seq]

    def admits(self, seq: int, *, stored: int) -> bool:
        """Whether a group that arrived may be stored: a place is reserved for it, or one is free."""
        return seq in self._reserved or stored + len(self._reserved) < self.capacity

    def note_stored(self, seq: int) -> list[Sender]:
        """Note that `seq` is stored; return the other senders that offered it and need not send it any more."""
        self._reserved.pop(seq, None)
        return list(self._waiting.pop(seq, ()))

    def grant(self, *, stored: int) -> list[tuple[Sender, int]]:
        """Reserve the free places, lowest sequence number first; return the (sender, seq) pairs to send now."""
        grants: list[tuple[Sender, int]] = []
        while self._order and stored + len(self._reserved) < self.capacity:
            seq = heapq.heappop(self._order)
            self._ordered.remove(seq)
            waiters = self._waiting.get(seq)
            if waiters is None or seq in self._reserved:
                continue
            sender = next(iter(waiters))
            self.withdraw(sender, seq)
            self._reserved[seq] = sender
            grants.append((sender, seq))
        return grants

    def forget_silent(self, *, now: float) -> dict[Sender, int]:
        """Forget the senders that were silent for too long; return how many reservations each of them had."""
        silent = {sender: 0 for sender, heard in self._heard.items() if heard.is_silent(now=now)}
        if not silent:
            return {}
        for sender in silent:
            del self._heard[sender]
        for seq, sender in list(self._reserved.items()):
            if sender in silent:
                self._release(seq)
                silent[sender] += 1
        for seq in [seq for seq, waiters in self._waiting.items() if not silent.keys().isdisjoint(waiters)]:
            for sender in silent:
                self.withdraw(sender, seq)
        return silent

    def next_silence(self) -> float | None:
        """Return when the next sender becomes silent if it sends nothing before; None if no sender is known."""
        return next_silence(self._heard.values())

    def _release(self, seq: int) -> None:
        del self._reserved[seq]
        if seq in self._waiting:
            self._queue(seq)

    def _queue(self, seq: int) -> None:
        if seq not in self._ordered:
            self._ordered.add(seq)
            heapq.heappush(self._order, seq)


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


class GroupPuller:
    """Receives groups and stores them in `sink`, from `start` to `close`."""

    def __init__(
        self,
        sink: GroupSink,
        *,
        keys: ReceiverKeys,
        limits: codec.Limits,
        silence_seconds: float = SILENCE_SECONDS,
        reach: Reach = LOOPBACK,
        encrypted: bool = False,
    ) -> None:
        """`limits`: groups beyond them are rejected. `silence_seconds`: a pusher that is silent for this long loses its
        credit. The others: as in `ServerSocket`."""
        self._keys = keys
        self._limits = limits
        self._sink = sink
        self._book = CreditBook[Connection](capacity=sink.capacity_groups, silence_seconds=silence_seconds)
        self._due: dict[Connection, Reply] = {}
        """The replies that are sent at the end of this batch."""
        self._warnings = RateLimitedLog(log)
        self._closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._server = ServerSocket(
            keys,
            reach=reach,
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
            for pusher, seq in self._book.grant(stored=len(self._sink)):
                self._reply(pusher).send.append(seq)
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
            reply = self._reply(arrival.connection)
            if self._book.hear(arrival.connection, now=now):
                reply.offer_again = True
            if arrival.message is not None:
                self._handle(arrival.message, arrival)
            if now > end:
                return

    def _reply(self, pusher: Connection) -> Reply:
        """Return the reply that is due to this pusher."""
        return self._due.setdefault(pusher, Reply())

    def _handle(self, content: msgspec.Raw, arrival: Arrival) -> None:
        pusher = arrival.connection
        try:
            message = _decoder.decode(content)
        except Exception as error:  # tolerance point: no message may end the stream, whichever error it causes
            reason = f"a message that is neither an Ask nor a GroupHeader: {error or type(error).__name__}"
            self._refuse(pusher, UNREADABLE, reason)
            return
        if isinstance(message, Ask):
            self._handle_ask(pusher, message)
            return
        try:
            if arrival.excess:
                raise WireError(f"group {message.seq} from {pusher.sender.name}: {arrival.excess}")
            self._handle_group(pusher, message, arrival.frames)
        except Exception as error:  # tolerance point: see above
            self._book.withdraw(pusher, message.seq)
            self._refuse(pusher, message.seq, str(error) or type(error).__name__)

    def _handle_ask(self, pusher: Connection, ask: Ask) -> None:
        for seq in ask.withdrawn:
            self._book.withdraw(pusher, seq)
        for seq, permit in ask.offered:
            try:
                self._check_lease(pusher.sender, seq, permit)
                self._limits.check_seq(seq, where=f"group {seq} from {pusher.sender.name}")
            except WireError as error:
                self._refuse(pusher, seq, str(error))
                continue
            if self._sink.knows(seq):
                self._reply(pusher).stored.append(seq)
            elif self._book.offer(pusher, seq):
                self._reply(pusher).send.append(seq)

    def _handle_group(self, pusher: Connection, header: codec.GroupHeader, frames: list[memoryview]) -> None:
        """Store a group, or note it as offered if there is no place for it. Raises `WireError`."""
        name = pusher.sender.name
        self._check_lease(pusher.sender, header.seq, header.permit)
        if header.worker != name:
            raise WireError(f"group {header.seq} of {header.worker[:40]!r} comes from {name}")
        group = codec.decode(header, frames, limits=self._limits, sender=name)
        full = not self._book.admits(group.seq, stored=len(self._sink)) and not self._sink.knows(group.seq)
        if full or not self._sink.offer(group):
            self._book.offer(pusher, group.seq)  # not offered before, or its reservation had expired
            return
        for owner in (pusher, *self._book.note_stored(group.seq)):
            self._reply(owner).stored.append(group.seq)

    def _check_lease(self, sender: Identity, seq: int, permit: str) -> None:
        if not self._keys.permits(seq, sender.name, permit):
            raise WireError(f"group {seq} was not leased to {sender.name}")

    def _refuse(self, pusher: Connection, seq: int, reason: str) -> None:
        self._sink.count_refused()
        reason = reason[:LONGEST_REASON]  # it may quote the message
        self._warnings.warning("refused a message from %s: %s", pusher.sender.name, reason)
        self._reply(pusher).refused.append(Refusal(seq, reason))

    def _forget_silent(self) -> None:
        now = time.monotonic()
        due = self._book.next_silence()
        if due is None or now < due:
            return
        for pusher, places in self._book.forget_silent(now=now).items():
            if places:
                log.warning(
                    "%s was granted %d places and has been silent for %.0f s: others may have them",
                    *(pusher.sender.name, places, self._book.silence_seconds),
                )

    def _send_replies(self) -> None:
        """Send each pusher that has sent something one message with all news for it; if there is none, a beat."""
        stored = len(self._sink)
        taken, capacity = stored + self._book.reserved, self._book.capacity
        eager = self._book.eager(stored=stored)
        for pusher, reply in self._due.items():
            if reply.send or reply.stored or reply.refused or reply.offer_again:
                reply.taken, reply.capacity, reply.eager = taken, capacity, eager
                pusher.session.send(_encoder.encode(reply))
            else:
                pusher.session.beat()
        self._due.clear()
