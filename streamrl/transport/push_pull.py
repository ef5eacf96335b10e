"""The stream of groups from rollout workers to DP heads: acknowledged, and paced by credit.

Each group goes to head `seq % heads` over a DEALER–ROUTER pair. Messages name sequence numbers and may be
repeated without harm:

    pusher                                  head
      │ ── Ask(offered=[7, 9]) ──────────────▶ │  "I have these groups in hand"
      │ ◀────────────── Reply(send=[7, 9]) ─── │  a place is reserved for each
      │ ── GroupHeader + raw arrays ─────────▶ │  decoded, checked, stored
      │ ◀──────────────── Reply(stored=[7]) ── │  acknowledged; `push` returns

Why offer first: a place is reserved only for an existing group, so no credit is idle at one pusher while another has
the group that the trainer waits for (`puller.py` shows that nothing can deadlock). While the head has room to spare,
`Reply.eager` is the number of groups that may be in flight without an offer. If such a group finds no place, it is not
lost: the head treats its message as an offer and requests the arrays again when it has a place.

Invariant: a pusher offers a group again every `resend_seconds` until it is acknowledged, and the head stores each
sequence number once; so losses, restarts of either side and twins do no harm. Messages of one pusher stay in order: a
repeated offer arrives after a group that is already in flight, and the reply to it is `stored`, not `send`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import msgspec
import zmq

from streamrl.errors import UNDECODABLE, PeerLost, WireError
from streamrl.transport import codec
from streamrl.transport.control import Peer
from streamrl.transport.credentials import Shown, connect
from streamrl.transport.liveness import LastHeard
from streamrl.types import TrajectoryGroup

log = logging.getLogger(__name__)

SEQS_PER_ASK = 4096
"""Maximum length of a list in one message; a longer one is split over several."""
LINGER_MS = 500
"""How long a closed socket tries to send its remaining messages, in milliseconds."""
UNREADABLE = -1
"""`Refusal.seq` of a message without a readable sequence number."""

Seq = Annotated[int, msgspec.Meta(ge=0)]
AskedSeqs = Annotated[list[Seq], msgspec.Meta(max_length=SEQS_PER_ASK)]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """From a pusher: the groups that it offers or withdraws."""

    offered: AskedSeqs
    """Groups in hand that wait for a credit or an acknowledgement."""
    permits: Annotated[list[str], msgspec.Meta(max_length=SEQS_PER_ASK)]
    """For each offered group, the proof that it was leased to the pusher."""
    withdrawn: AskedSeqs
    """Groups no longer in hand."""


class Refusal(msgspec.Struct, frozen=True):
    """A rejected group, and the reason."""

    seq: int
    """`UNREADABLE` if the message did not contain it."""
    reason: str


class Reply(msgspec.Struct):
    """From a head: reply to everything that it has received from one pusher since the last reply."""

    send: list[int] = []
    """Groups for which a place is reserved."""
    stored: list[int] = []
    """Groups stored, now or before."""
    refused: list[Refusal] = []
    """Groups that break the wire format; resending them would not help."""
    taken: int = 0
    """Places taken at the head: by stored groups, and by reserved ones."""
    capacity: int = 0
    """Total number of places."""
    eager: int = 0
    """Number of groups that the pusher may have in flight without an offer."""


_NOW = int(zmq.NOBLOCK)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Reply)


class GroupPusher:
    """A rollout worker's end: sends groups to the DP heads. Belongs to one event loop."""

    def __init__(
        self,
        *,
        worker: str,
        heads: Sequence[Peer],
        shown: Shown,
        max_group_bytes: int,
        resend_seconds: float,
        warn_seconds: float = 30.0,
    ) -> None:
        """`heads`: the receivers, by data-parallel rank; `shown`: the credential and keys that identify this process to
        them. Call with the event loop running."""
        self._max_group_bytes = max_group_bytes
        self._closed = False
        self._links = [
            _Link(
                worker=worker,
                head=head,
                peer=peer,
                shown=shown,
                resend_seconds=resend_seconds,
                warn_seconds=warn_seconds,
            )
            for head, peer in enumerate(heads)
        ]

    async def push(self, group: TrajectoryGroup, *, permit: str) -> None:
        """Send `group` to its head and return once it is stored there, now or before. `permit`: from its admission.

        Waits as long as the head has no place, with a warning in the log every `warn_seconds`.
        The arrays must not change until it returns. Raises `WireError` when the head (or the codec)
        rejects the group, and `PeerLost` when the pusher is closed before the group is stored.
        """
        if self._closed:
            raise PeerLost(f"group {group.seq} cannot be pushed: the pusher is closed")
        frames = codec.encode(group, max_group_bytes=self._max_group_bytes, permit=permit)
        await self._links[group.seq % len(self._links)].push(group.seq, frames, permit)

    async def close(self) -> None:
        """Give up all unacknowledged groups, and withdraw them at the heads."""
        self._closed = True
        for link in self._links:
            link.close()


class _Pending:
    """A group that is not acknowledged yet."""

    __slots__ = ("acted", "done", "frames", "permit", "sends", "started")  # hot: one for each push

    def __init__(self, frames: list[codec.Frame], permit: str, done: asyncio.Future[None], now: float) -> None:
        self.frames = frames
        self.permit = permit
        self.done = done
        self.started = now
        self.acted = now
        self.sends = 0


class _Link:
    """A pusher's connection to one head."""

    def __init__(
        self, *, worker: str, head: int, peer: Peer, shown: Shown, resend_seconds: float, warn_seconds: float
    ) -> None:
        self._name = f"trainer head {head} at {peer.address}"
        self._worker = worker
        self._resend_seconds = resend_seconds
        self._warn_seconds = warn_seconds
        self._pending: OrderedDict[int, _Pending] = OrderedDict()  # least recently sent or offered first
        self._offered: list[int] = []
        self._withdrawn: list[int] = []
        self._heard = LastHeard(now=-math.inf, patience=2 * resend_seconds)  # no message yet
        self._warned = 0.0
        self._taken = self._capacity = self._eager = 0
        self._under_way = 0
        self._flushing: asyncio.Handle | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._packer = codec.FramePacker()
        self._address = peer.address
        self._connected = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER, copy_threshold=codec.COPIED_BELOW)
        self._socket.set(zmq.SNDHWM, 0)  # credit is the limit
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, LINGER_MS)
        keep_alive(self._socket)
        connect(self._socket, peer.address, curve_key=peer.curve_key, shown=shown, link=uuid.uuid4().hex[:8])
        self._loop.add_reader(self._socket.fileno(), self._receive)

    async def push(self, seq: int, frames: list[codec.Frame], permit: str) -> None:
        while (twin := self._pending.get(seq)) is not None:
            await asyncio.wait([twin.done])
            if not twin.done.cancelled():
                return twin.done.result()
        item = _Pending(frames, permit, self._loop.create_future(), time.monotonic())
        self._pending[seq] = item
        if seq in self._withdrawn:
            self._withdrawn.remove(seq)  # it is in hand again
        if self._under_way < self._eager:
            self._send(seq, item)
            self._flush_soon()
        else:
            self._offer([seq])
        if self._checking is None:
            self._check_later()
        try:
            await item.done
        finally:
            if self._pending.get(seq) is item:
                self._remove(seq)
                self._withdrawn.append(seq)
                self._flush_soon()
        return None

    def close(self) -> None:
        if self._socket.closed:
            return
        for handle in (self._flushing, self._checking):
            if handle is not None:
                handle.cancel()
        unstored, self._pending = self._pending, OrderedDict()
        self._offered.clear()
        self._withdrawn.extend(unstored)
        self._send_asks()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for seq, item in unstored.items():
            if not item.done.done():
                item.done.set_exception(PeerLost(f"the pusher was closed before {self._name} stored group {seq}"))

    def _offer(self, seqs: Sequence[int]) -> None:
        self._offered.extend(seqs)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Send all pending offers and withdrawals at the end of this turn of the event loop, in one message."""
        if self._flushing is None and not self._socket.closed:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        self._send_asks()
        self._receive()  # sending may have consumed the wake-up for a message that arrived

    def _send_asks(self) -> None:
        while self._offered or self._withdrawn:
            offered = [seq for seq in self._offered[:SEQS_PER_ASK] if seq in self._pending]
            permits = [self._pending[seq].permit for seq in offered]
            ask = Ask(offered=offered, permits=permits, withdrawn=self._withdrawn[:SEQS_PER_ASK])
            del self._offered[:SEQS_PER_ASK], self._withdrawn[:SEQS_PER_ASK]
            try:
                self._socket.send(_encoder.encode(ask), _NOW)
            except zmq.Again:
                self._connect_again()

    def _receive(self) -> None:
        while True:
            try:
                message = self._socket.recv(_NOW)
            except zmq.Again:
                return
            try:
                reply = _decoder.decode(message)
            except UNDECODABLE as error:
                log.error("%s: %s sent something else than a Reply: %s", self._worker, self._name, error)
                continue
            self._handle(reply)

    def _handle(self, reply: Reply) -> None:
        self._heard.hear(now=time.monotonic())
        self._taken, self._capacity, self._eager = reply.taken, reply.capacity, reply.eager
        for seq in reply.stored:
            item = self._remove(seq)
            if item is not None:
                _resolve(item.done, None)
        for refusal in reply.refused:
            item = self._remove(refusal.seq)
            error = WireError(f"{self._name} refused a message: {refusal.reason}")
            if item is not None:
                _resolve(item.done, error)
            else:
                log.error("%s: %s", self._worker, error)
        for seq in reply.send:
            item = self._pending.get(seq)
            if item is None:
                self._withdrawn.append(seq)
                self._flush_soon()
            else:
                self._send(seq, item)

    def _remove(self, seq: int) -> _Pending | None:
        """Remove `seq`, which is stored, rejected or given up, and return it if it was pending."""
        item = self._pending.pop(seq, None)
        self._under_way -= item is not None and item.sends > 0
        return item

    def _send(self, seq: int, item: _Pending) -> None:
        self._under_way += item.sends == 0
        item.sends += 1
        item.acted = time.monotonic()
        self._pending.move_to_end(seq)
        *first, last = self._packer.pack(item.frames)
        try:
            for frame in first:
                self._socket.send(frame, _NOW_MORE, copy=False)
            self._socket.send(last, _NOW, copy=len(last) < codec.COPIED_BELOW)
        except zmq.Again:
            self._connect_again()

    def _connect_again(self) -> None:
        """Connect again: the head rejected this process, and ZMQ does not retry. Pending groups are offered again."""
        now = time.monotonic()
        if now - self._connected >= self._resend_seconds:
            log.error("%s: %s has turned it away: it does not know its key; trying again", self._worker, self._name)
            self._connected = now
            self._socket.connect(self._address)

    def _check_later(self) -> None:
        self._checking = self._loop.call_later(min(self._resend_seconds, self._warn_seconds) / 2, self._check)

    def _check(self) -> None:
        """Offer groups without a reply for `resend_seconds` again; warn about groups that wait for `warn_seconds`."""
        self._checking = None
        if not self._pending:
            return
        now = time.monotonic()
        quiet: list[int] = []
        for seq, item in self._pending.items():
            if now - item.acted < self._resend_seconds:
                break
            quiet.append(seq)
        for seq in quiet:
            self._pending[seq].acted = now
            self._pending.move_to_end(seq)
        if quiet:
            self._offer(quiet)
        if now - self._warned >= self._warn_seconds:
            self._warn(now)
        self._check_later()

    def _warn(self, now: float) -> None:
        oldest, started = min(((seq, item.started) for seq, item in self._pending.items()), key=lambda pair: pair[1])
        if now - started < self._warn_seconds:
            return
        self._warned = now
        if self._heard.is_silent(now=now):
            silence = (
                "has not answered yet (is its port open to this machine?)"
                if self._heard.ended
                else f"is silent for {self._heard.seconds(now=now):.0f} s"
            )
            log.warning(
                "%s waits for %s, which %s: %d groups unacknowledged, oldest seq %d for %.0f s",
                *(self._worker, self._name, silence, len(self._pending), oldest, now - started),
            )
        else:
            log.warning(
                "%s waits for credit of %s: %d of %d places taken there, %d groups wait here, oldest seq %d for %.0f s",
                *(self._worker, self._name, self._taken, self._capacity),
                *(len(self._pending), oldest, now - started),
            )


def _resolve(done: asyncio.Future[None], error: WireError | None) -> None:
    if done.done():  # the pusher's caller was cancelled
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def keep_alive(endpoint: zmq.Socket[bytes]) -> None:
    """Have `endpoint` notice within about a minute when the other machine disappears without closing."""
    endpoint.set(zmq.TCP_KEEPALIVE, 1)
    endpoint.set(zmq.TCP_KEEPALIVE_IDLE, 30)
    endpoint.set(zmq.TCP_KEEPALIVE_INTVL, 10)
    endpoint.set(zmq.TCP_KEEPALIVE_CNT, 3)
