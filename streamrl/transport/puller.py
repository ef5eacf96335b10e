"""The receiving end of the stream, at a DP head: one thread that waits, decodes, stores and replies.

`GroupPuller` owns the socket, its thread and the credit book; `push_pull.py` tells the protocol. Nothing in it depends
on an event loop, so groups are received while the model worker computes. Invariants: a group is acknowledged only
after the sink has it; a message that breaks the wire format is refused with a reason and changes nothing else.

`CreditBook` decides who may send which group; it is pure, without I/O or clocks. A credit is a place reserved for one
sequence number that a sender said it has in hand. Stored and reserved groups together never exceed the capacity. Three
consequences:

- a credit is never hoarded: whoever has no group has no credit, so with `over_age = "wait"` and a capacity of
  (η + 1) · P, which is as many groups as can be alive at once, every group in hand gets its place at once, however many
  senders there are: the stream cannot deadlock;
- when places are short, the lowest sequence number goes first, whoever has it: the order in which batches need groups,
  in which no sender starves another;
- a sender that stays silent for `silence_seconds` loses its reservations and its turn.

While there is room to spare, asking would cost a round trip for nothing: `eager` says how many groups each sender may
have under way unasked. It reserves nothing, so it withholds nothing from anybody; should such a group find no place
after all, it queues up as if it had been offered.
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
"""How much a head receives, and for how long, before it sends acknowledgements and grants."""
SILENT_RESENDS = 3
REFUSED_AT_ONCE = 16
"""Groups refused at once to somebody who may not offer any; those beyond hear of it when they are offered again."""
LONGEST_REASON = 1000
"""Characters in the reason for refusing a message."""


class SinkOutcome(Enum):
    """What became of a group that was given to a sink."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    FULL = "full"


class GroupSink(Protocol):
    """Where a `GroupPuller` puts groups; called from its thread."""

    capacity_groups: int

    def __len__(self) -> int:
        """Groups stored now; only `offer` makes it grow."""

    def knows(self, seq: int) -> bool:
        """Whether `seq` was stored, however long ago."""

    def offer(self, group: TrajectoryGroup) -> SinkOutcome:
        """Store `group` unless its `seq` is known or there is no place."""

    def count_refused(self) -> None:
        """A message broke the wire format."""

    def notify_freed(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called, in any thread, whenever places became free."""


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
        """`port` 0: any free one. `limits`: groups beyond them are refused. `resend_seconds`: of the pushers; one
        silent for `SILENT_RESENDS` times as long loses its credit. `announced`: the address that pushers are told, if
        it is another one than `host`. `keys`: the process's own, if its connections are to be encrypted."""
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
        """Begin to receive from those whom `verifier` knows, in a thread without which the process cannot do."""
        self._verifier = verifier
        self._sink.notify_freed(self._wake)
        self._thread.start()

    def expect(self, *, newest_version: int, seqs: int) -> None:
        """From now on take groups that a policy up to `newest_version` sampled, with sequence numbers below `seqs`. May
        be called from any thread."""
        self._limits = msgspec.structs.replace(self._limits, newest_version=newest_version, seqs=seqs)

    def close(self) -> None:
        """Stop the thread and close the socket; groups not acknowledged stay with their pushers."""
        self._sink.notify_freed(None)
        self._closing = True
        if self._thread.ident is None:
            self._release()
            return
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """Places became free, or it is to end: look again. May be called from any thread."""
        with suppress(OSError):  # as many wake-ups as fit are on their way already, or it is closed
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
        """Return the milliseconds until the book has something to forget."""
        due = self._book.next_silence()
        return None if due is None else max(0, int((due - time.monotonic()) * 1000) + 1)

    def _receive_batch(self) -> None:
        """Handle what has arrived, one batch at most."""
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
        """Refuse a message of somebody who may say nothing here; only its sequence numbers are looked at."""
        self._sink.count_refused()
        self._seldom.warning("refused a message of %s", why)
        seqs = [UNREADABLE]
        with suppress(Exception):  # tolerance point: whatever it makes a decoder raise
            message = _decoder.decode(frames[0]) if len(frames[0]) <= codec.MAX_HEADER_BYTES else None
            if isinstance(message, codec.GroupHeader):
                seqs = [message.seq]
            elif isinstance(message, Ask) and message.offered:
                seqs = message.offered[:REFUSED_AT_ONCE]
        reply = self._reply(sender)
        reply.refused += [Refusal(seq, f"this head does not take messages of {why}") for seq in seqs]

    def _receive_frames(self) -> tuple[list[memoryview], str, str]:
        """Return the frames of one message after its sender's, and what is too much in it: then the first frame alone,
        for ZMQ's own limit is one of each frame. What is left out is given back to ZMQ as it is read. Last, the CURVE
        key of the connection; empty: it is not encrypted."""
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
        except Exception as error:  # tolerance point: no message may end the stream, whatever it makes a decoder raise
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
            self._book.offer(sender, group.seq)  # came unasked, or its reservation had lapsed
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
        reason = reason[:LONGEST_REASON]  # it may quote what was sent
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
        """Send each pusher one message with everything that is new for it."""
        stored = len(self._sink)
        taken, capacity = stored + self._book.reserved, self._book.capacity
        eager = self._book.eager(stored=stored)
        for sender, reply in self._replies.items():
            reply.taken, reply.capacity, reply.eager = taken, capacity, eager
            # To a pusher that is gone this goes nowhere; one that is back offers its groups again.
            self._socket.send_multipart([sender, _encoder.encode(reply)], zmq.NOBLOCK)
        self._replies.clear()


def _name(sender: bytes) -> str:
    """Return whom a routing id names, for messages: it begins with that, and the rest is a secret."""
    return sender.split(b" ", 1)[0].decode("ascii", "backslashreplace")


def _not_leased(seq: int, sender: Identity) -> str:
    return f"group {seq} was not leased to {sender.name}"


class CreditBook:
    """The reservations and offers of one head; a sender is named by any bytes, and times are in seconds."""

    def __init__(self, *, capacity: int, silence_seconds: float) -> None:
        self.capacity = capacity
        self.silence_seconds = silence_seconds
        self._reserved: dict[int, bytes] = {}
        self._waiting: dict[int, dict[bytes, None]] = {}
        self._order: list[int] = []  # heap; every seq that waits without reservation is in it, others may be
        self._ordered: set[int] = set()  # what is in the heap
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
        """Return how many groups each sender may have under way unasked: its share of half the free places. `stored`:
        groups at the head now."""
        if self._waiting:
            return 0
        return (self.capacity - stored - len(self._reserved)) // (2 * max(1, len(self._heard)))

    def hear(self, sender: bytes, *, now: float) -> None:
        """Note that `sender` was heard."""
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
        """Note that `seq` is stored; return who else offered it, and need not send it any more."""
        self._reserved.pop(seq, None)
        return list(self._waiting.pop(seq, ()))

    def grant(self, *, stored: int) -> list[tuple[bytes, int]]:
        """Reserve the free places, lowest sequence number first, and return who may now send what."""
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
        """Take back the reservations of senders that have been silent for too long, and return how many of each."""
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
        """Return when the next sender will have been silent for too long, unless it is heard before; None: nobody is
        known."""
        return next_silence(self._heard.values())

    def _release(self, seq: int) -> None:
        del self._reserved[seq]
        if seq in self._waiting:
            self._queue(seq)

    def _queue(self, seq: int) -> None:
        if seq not in self._ordered:
            self._ordered.add(seq)
            heapq.heappush(self._order, seq)
