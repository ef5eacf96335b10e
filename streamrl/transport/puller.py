"""The receiving end of the stream, at a DP head: one thread that waits, decodes, stores and replies.

`GroupPuller` owns the socket, its thread and the credit book; `push_pull.py` describes the protocol. The thread does
not depend on an event loop, so groups are received while the model worker computes. Invariants: a group is acknowledged
only after the sink has it; a message that breaks the wire format is rejected with a reason and changes nothing else.

`CreditBook` decides which sender may send which group; it is pure, without I/O or clocks. A credit is a place reserved
for one sequence number that a sender has offered. Stored and reserved groups together never exceed the capacity. Three
consequences:

- credits are never hoarded: a sender without groups has no credit. With `over_age = "wait"` and a capacity of
  (η + 1) · P, the maximum number of groups alive at once, every group in hand gets its place at once with any number of
  senders: the stream cannot deadlock;
- when places are short, the lowest sequence number goes first, from any sender: this is the order in which batches need
  groups, and no sender starves another;
- a sender that stays silent for `silence_seconds` loses its reservations and its turn.

While there is room to spare, offering first would waste a round trip: `eager` is the number of groups that each sender
may have in flight without offering them first. It reserves nothing, so it takes no place from any sender. If such a
group finds no free place, it queues as if it had been offered.
"""

from __future__ import annotations

import heapq
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Protocol

import msgspec
import zmq

from streamrl import essential
from streamrl.errors import WireError
from streamrl.transport import codec
from streamrl.transport.addresses import url_of
from streamrl.transport.credentials import CurveKeys, Identity, Stranger, Verifier, bind, encrypt_server, user_of
from streamrl.transport.liveness import LastHeard, next_silence
from streamrl.transport.push_pull import LINGER_MS, UNREADABLE, Ask, Refusal, Reply, keep_alive
from streamrl.transport.seldom import Seldom
from streamrl.types import TrajectoryGroup

log = logging.getLogger(__name__)

MESSAGES_PER_BATCH = 64
BATCH_SECONDS = 0.005
"""Limits of one batch, in messages and time, after which a head sends acknowledgements and grants."""
SILENT_RESENDS = 3
REFUSED_AT_ONCE = 16
"""Maximum rejected groups per message of an unauthorized sender; further ones are rejected when offered again."""
LONGEST_REASON = 1000
"""Maximum length of the reason for rejecting a message, in characters."""


class SinkOutcome(Enum):
    """Result of offering a group to a sink."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    FULL = "full"


class GroupSink(Protocol):
    """Where a `GroupPuller` puts groups; called from its thread."""

    capacity_groups: int

    def __len__(self) -> int:
        """Return the number of stored groups; only `offer` increases it."""

    def knows(self, seq: int) -> bool:
        """Whether `seq` was ever stored."""

    def offer(self, group: TrajectoryGroup) -> SinkOutcome:
        """Store `group` unless its `seq` is known or no place is free."""

    def count_refused(self) -> None:
        """Count a message that broke the wire format."""

    def notify_freed(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called, in any thread, whenever places become free."""


_NOW = int(zmq.NOBLOCK)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ask | codec.GroupHeader)


class GroupPuller:
    """Receives groups and stores them in `sink`, from `start` to `close`."""

    def __init__(
        self,
        sink: GroupSink,
        *,
        host: str,
        port: int = 0,
        limits: codec.Limits,
        resend_seconds: float = 10.0,
        announced: str = "",
        keys: CurveKeys | None = None,
    ) -> None:
        """`port` 0: any free one. `limits`: groups beyond them are rejected. `resend_seconds`: the pushers' setting; a
        pusher that is silent for `SILENT_RESENDS` times as long loses its credit. `announced`: the address that pushers
        use, if it is not `host`. `keys`: the process's own key pair, if its connections are encrypted."""
        self._verifier = Verifier("model_worker")
        self._limits = limits
        self._sink = sink
        silence_seconds = SILENT_RESENDS * resend_seconds
        self._book = CreditBook(capacity=sink.capacity_groups, silence_seconds=silence_seconds)
        self._replies: dict[bytes, Reply] = {}
        self._seldom = Seldom(log)
        self._encrypted = keys is not None
        self._closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a pusher that reconnects replaces its dead connection
        self._socket.set(zmq.MAXMSGSIZE, max(limits.max_group_bytes, codec.MAX_HEADER_BYTES))
        self._socket.set(zmq.LINGER, LINGER_MS)
        keep_alive(self._socket)
        if keys is not None:
            encrypt_server(self._socket, keys)
        self.endpoint = url_of(announced or host, bind(self._socket, host, port), scheme="tcp")
        self._thread = essential.thread(self._run, name=f"the ingress at {self.endpoint}")

    @property
    def running(self) -> bool:
        """Whether groups are being received."""
        return self._thread.is_alive()

    def start(self, verifier: Verifier) -> None:
        """Start receiving from the senders that `verifier` knows, in a thread whose failure ends the process."""
        self._verifier = verifier
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
        self._socket.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        while not self._closing:
            for ready, _ in poller.poll(self._until_next_silence()):
                if ready is not self._socket:
                    self._wake_receiver.recv(4096)
            self._receive_batch()
            self._forget_silent()
            self._grant()
            self._send_replies()

    def _until_next_silence(self) -> int | None:
        """Return the milliseconds until the next sender becomes silent; None if there are no senders."""
        due = self._book.next_silence()
        return None if due is None else max(0, int((due - time.monotonic()) * 1000) + 1)

    def _receive_batch(self) -> None:
        """Handle the messages that have arrived, one batch at most."""
        end = time.monotonic() + BATCH_SECONDS
        for _ in range(MESSAGES_PER_BATCH):
            try:
                sender = self._socket.recv(_NOW)  # always followed by at least one frame
            except zmq.Again:
                return
            frames, excess, user = self._receive_frames()
            now = time.monotonic()
            try:
                known = self._verifier.sender(sender, user=user)
            except Stranger as stranger:
                self._turn_away(sender, frames, str(stranger))
            else:
                self._handle(sender, known, frames, excess, now)
            if now > end:
                return

    def _turn_away(self, sender: bytes, frames: list[memoryview], why: str) -> None:
        """Reject a message of an unauthorized sender; read only its sequence numbers."""
        self._sink.count_refused()
        self._seldom.warning("refused a message of %s", why)
        seqs = [UNREADABLE]
        with suppress(Exception):  # tolerance point: the message may make a decoder raise any error
            message = _decoder.decode(frames[0]) if len(frames[0]) <= codec.MAX_HEADER_BYTES else None
            if isinstance(message, codec.GroupHeader):
                seqs = [message.seq]
            elif isinstance(message, Ask) and message.offered:
                seqs = message.offered[:REFUSED_AT_ONCE]
        reply = self._reply(sender)
        reply.refused += [Refusal(seq, f"this head does not take messages of {why}") for seq in seqs]

    def _receive_frames(self) -> tuple[list[memoryview], str, str]:
        """Return the frames of one message after the sender's, a text if it is too large, and the CURVE key of its
        connection (empty if it is not encrypted).

        ZMQ's own limit counts each frame alone. If the message is too large, return only its first frame; the others
        are freed as they are read."""
        frames: list[memoryview] = []
        count = size = 0
        largest = codec.MAX_HEADER_BYTES + self._limits.max_group_bytes
        more, user = True, ""
        while more:
            frame = self._socket.recv(_NOW, copy=False)  # parts of a message arrive together
            if self._encrypted and not user:
                user = user_of(frame)
            count, size, more = count + 1, size + len(frame), frame.more
            if count <= codec.MOST_FRAMES and size <= largest:
                frames.append(frame.buffer)
            else:
                del frames[1:]
        if count <= codec.MOST_FRAMES and size <= largest:
            return frames, "", user
        excess = f"a message of {count} frames with {size} bytes, more than {codec.MOST_FRAMES} or {largest}"
        return frames, excess, user

    def _handle(self, sender: bytes, known: Identity, frames: list[memoryview], excess: str, now: float) -> None:
        if not frames or len(frames[0]) > codec.MAX_HEADER_BYTES:
            self._refuse(sender, UNREADABLE, f"a first frame of more than {codec.MAX_HEADER_BYTES} bytes, or none")
            return
        try:
            message = _decoder.decode(frames[0])
        except Exception as error:  # tolerance point: no message may end the stream, whichever error it causes
            reason = f"a first frame that is neither an Ask nor a GroupHeader: {error or type(error).__name__}"
            self._refuse(sender, UNREADABLE, reason)
            return
        self._book.hear(sender, now=now)
        if excess:
            seq = UNREADABLE if isinstance(message, Ask) else message.seq
            self._book.withdraw(sender, seq)
            self._refuse(sender, seq, excess)
        elif isinstance(message, Ask):
            self._handle_ask(sender, known, message)
        else:
            self._handle_group(sender, known, message, frames[1:])

    def _handle_ask(self, sender: bytes, known: Identity, ask: Ask) -> None:
        reply = self._reply(sender)
        for seq in ask.withdrawn:
            self._book.withdraw(sender, seq)
        if len(ask.permits) != len(ask.offered):
            self._refuse(sender, UNREADABLE, f"{len(ask.permits)} permits for {len(ask.offered)} groups")
            return
        for seq, permit in zip(ask.offered, ask.permits, strict=True):
            if not self._verifier.permits(known, seq, permit):
                self._refuse(sender, seq, _not_leased(seq, known))
            elif seq >= self._limits.seqs:
                self._refuse_seq(sender, seq)
            elif self._sink.knows(seq):
                reply.stored.append(seq)
            elif self._book.offer(sender, seq):
                reply.send.append(seq)  # the grant, or the group, was lost on the way

    def _handle_group(
        self, sender: bytes, known: Identity, header: codec.GroupHeader, frames: list[memoryview]
    ) -> None:
        if not self._verifier.permits(known, header.seq, header.permit):
            self._refuse(sender, header.seq, _not_leased(header.seq, known))
            return
        if header.worker != known.name:
            self._book.withdraw(sender, header.seq)
            self._refuse(sender, header.seq, f"group {header.seq} of {header.worker[:40]!r} comes from {known.name}")
            return
        try:
            group = codec.decode(header, frames, limits=self._limits, sender=_name(sender))
        except Exception as error:  # tolerance point: see above
            self._book.withdraw(sender, header.seq)
            self._refuse(sender, header.seq, str(error) or type(error).__name__)
            return
        full = not self._book.admits(group.seq, stored=len(self._sink)) and not self._sink.knows(group.seq)
        if full or self._sink.offer(group) is SinkOutcome.FULL:
            self._book.offer(sender, group.seq)  # not offered before, or its reservation had expired
            self._reply(sender)
            return
        for other in (sender, *self._book.note_stored(group.seq)):
            self._reply(other).stored.append(group.seq)

    def _refuse_seq(self, sender: bytes, seq: int) -> None:
        try:
            self._limits.check_seq(seq, where=f"group {seq} from {_name(sender)}")
        except WireError as error:
            self._refuse(sender, seq, str(error))

    def _refuse(self, sender: bytes, seq: int, reason: str) -> None:
        self._sink.count_refused()
        reason = reason[:LONGEST_REASON]  # it may quote the message
        self._seldom.warning("refused a message from %s: %s", _name(sender), reason)
        self._reply(sender).refused.append(Refusal(seq, reason))

    def _forget_silent(self) -> None:
        now = time.monotonic()
        due = self._book.next_silence()
        if due is None or now < due:
            return
        for sender, places in self._book.forget_silent(now=now).items():
            log.warning(
                "%s was granted %d places and has been silent for %.0f s: others may have them",
                *(_name(sender), places, self._book.silence_seconds),
            )

    def _grant(self) -> None:
        for sender, seq in self._book.grant(stored=len(self._sink)):
            self._reply(sender).send.append(seq)

    def _reply(self, sender: bytes) -> Reply:
        reply = self._replies.get(sender)
        if reply is None:
            reply = self._replies[sender] = Reply()
        return reply

    def _send_replies(self) -> None:
        """Send each pusher one message with all its news."""
        stored = len(self._sink)
        taken, capacity = stored + self._book.reserved, self._book.capacity
        eager = self._book.eager(stored=stored)
        for sender, reply in self._replies.items():
            reply.taken, reply.capacity, reply.eager = taken, capacity, eager
            # A message to a dead pusher is dropped; a pusher that returns offers its groups again.
            self._socket.send_multipart([sender, _encoder.encode(reply)], zmq.NOBLOCK)
        self._replies.clear()


def _name(sender: bytes) -> str:
    """Return the sender's name for messages: the first part of its routing id; the rest is a secret."""
    return sender.split(b" ", 1)[0].decode("ascii", "backslashreplace")


def _not_leased(seq: int, sender: Identity) -> str:
    return f"group {seq} was not leased to {sender.name}"


class CreditBook:
    """The reservations and offers of one head; a sender is identified by bytes, and times are in seconds."""

    def __init__(self, *, capacity: int, silence_seconds: float) -> None:
        self.capacity = capacity
        self.silence_seconds = silence_seconds
        self._reserved: dict[int, bytes] = {}
        self._waiting: dict[int, dict[bytes, None]] = {}
        self._order: list[int] = []  # heap: every seq that waits without reservation, possibly others
        self._ordered: set[int] = set()  # members of the heap
        self._heard: dict[bytes, LastHeard] = {}

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

    def hear(self, sender: bytes, *, now: float) -> None:
        """Note a message of `sender`."""
        if sender in self._heard:
            self._heard[sender].hear(now=now)
        else:
            self._heard[sender] = LastHeard(now=now, patience=self.silence_seconds)

    def offer(self, sender: bytes, seq: int) -> bool:
        """Note that `sender` has `seq` in hand; return whether a place is reserved for it already, so it may send."""
        if self._reserved.get(seq) == sender:
            return True
        self._waiting.setdefault(seq, {})[sender] = None
        self._queue(seq)
        return False

    def withdraw(self, sender: bytes, seq: int) -> None:
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

    def note_stored(self, seq: int) -> list[bytes]:
        """Note that `seq` is stored; return the other senders that offered it and need not send it any more."""
        self._reserved.pop(seq, None)
        return list(self._waiting.pop(seq, ()))

    def grant(self, *, stored: int) -> list[tuple[bytes, int]]:
        """Reserve the free places, lowest sequence number first; return the (sender, seq) pairs to send now."""
        grants: list[tuple[bytes, int]] = []
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

    def forget_silent(self, *, now: float) -> dict[bytes, int]:
        """Release the reservations of senders that were silent for too long; return their number by sender."""
        silent = {sender for sender, heard in self._heard.items() if heard.is_silent(now=now)}
        if not silent:
            return {}
        taken: dict[bytes, int] = {}
        for sender in silent:
            del self._heard[sender]
        for seq, sender in list(self._reserved.items()):
            if sender in silent:
                self._release(seq)
                taken[sender] = taken.get(sender, 0) + 1
        for seq in [seq for seq, waiters in self._waiting.items() if not silent.isdisjoint(waiters)]:
            for sender in silent:
                self.withdraw(sender, seq)
        return taken

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
