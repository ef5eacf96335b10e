"""The stream of groups from rollout workers to DP heads: acknowledged, and paced by credit.

Each group goes to head `seq % heads`, over a session (`session.py`):

    pusher                                  head
      │ ── Ask(offered=[7, 9]) ──────────────▶ │  "I have these groups in hand"
      │ ◀────────────── Reply(send=[7, 9]) ─── │  a place is reserved for each
      │ ── GroupHeader + raw arrays ─────────▶ │  decoded, checked, stored
      │ ◀──────────────── Reply(stored=[7]) ── │  acknowledged; `push` returns

Why offer first: a place is reserved only for an existing group, so no credit is idle at one pusher while another has
the group that the trainer waits for (`CreditBook` shows that nothing can deadlock). While the head has room to spare,
`Reply.eager` is the number of groups that may be in flight without an offer. If such a group finds no place, it is not
lost: the head treats its message as an offer and requests the arrays again when it has a place.

The session sends lost messages again and processes each once; the head stores each sequence number once, so two
pushers of one group do no harm. A pusher lives as long as its heads: if one of them dies, the run goes back, and
rollout workers open another pusher to the new heads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from streamrl import essential
from streamrl.errors import UNDECODABLE, PeerLost, StreamRLError, WireError
from streamrl.transport import codec
from streamrl.transport.control import Credential, Peer
from streamrl.transport.session import Frame
from streamrl.transport.sockets import ClientSocket
from streamrl.types import TrajectoryGroup
from streamrl.waits import cancel

log = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
"""Interval of the beats of a pusher with groups in hand."""
SILENT_SECONDS = 10.0
"""A head that has sent nothing for this long is called silent in warnings."""
SEQS_PER_ASK = 4096
"""Maximum length of a list in one message; a longer one is split over several."""
UNREADABLE = -1
"""`Refusal.seq` of a message without a readable sequence number."""

Seq = Annotated[int, msgspec.Meta(ge=0)]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """From a pusher: the groups that it offers or withdraws."""

    offered: Annotated[list[tuple[Seq, str]], msgspec.Meta(max_length=SEQS_PER_ASK)]
    """Groups in hand that wait for a credit or an acknowledgement, each with its permit."""
    withdrawn: Annotated[list[Seq], msgspec.Meta(max_length=SEQS_PER_ASK)]
    """Groups no longer in hand."""


class Refusal(msgspec.Struct, frozen=True):
    """A rejected group, and the reason."""

    seq: int
    """`UNREADABLE` if the message did not contain it."""
    reason: str


class Reply(msgspec.Struct):
    """From a head: everything that concerns one pusher since the last reply."""

    send: list[int] = []
    """Groups for which a place is reserved."""
    stored: list[int] = []
    """Groups stored, now or before."""
    refused: list[Refusal] = []
    """Groups that break the wire format."""
    offer_again: bool = False
    """The head has no offer of the pusher, because the pusher is new or was silent: offer all groups in hand."""
    taken: int = 0
    """Places taken at the head: by stored groups, and by reserved ones."""
    capacity: int = 0
    """Total number of places."""
    eager: int = 0
    """Number of groups that the pusher may have in flight without an offer."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Reply)


class GroupPusher:
    """A rollout worker's end: sends groups to the DP heads. Belongs to one event loop."""

    def __init__(
        self,
        *,
        worker: str,
        heads: Sequence[Peer],
        credential: Credential,
        max_group_bytes: int,
        beat_seconds: float = BEAT_SECONDS,
        warn_seconds: float = 30.0,
    ) -> None:
        """`heads`: the receivers, by data-parallel rank. Call with the event loop running."""
        self._max_group_bytes = max_group_bytes
        self._closed = False
        self._links = [
            _Link(
                worker=worker,
                head=f"trainer head {rank} at {peer.address}",
                socket=ClientSocket(peer.address, credential),
                beat_seconds=min(beat_seconds, warn_seconds),
                warn_seconds=warn_seconds,
            )
            for rank, peer in enumerate(heads)
        ]

    async def push(self, group: TrajectoryGroup, *, permit: str) -> None:
        """Send `group` to its head and return once it is stored there, now or before. `permit`: from its admission.

        Waits as long as the head has no place, with a warning in the log every `warn_seconds`.
        The arrays must not change until it returns. Raises `WireError` when the head rejects the group or this process,
        or the codec rejects the group, and `PeerLost` when the pusher is closed before the group is stored.
        """
        if self._closed:
            raise PeerLost(f"group {group.seq} cannot be pushed: the pusher is closed")
        header, *arrays = codec.encode(group, max_group_bytes=self._max_group_bytes, permit=permit)
        await self._links[group.seq % len(self._links)].push(group.seq, _Pending(bytes(header), arrays, permit))

    async def close(self) -> None:
        """Give up all unacknowledged groups, and withdraw them at the heads."""
        self._closed = True
        await cancel(*(task for link in self._links for task in link.close()))


class _Pending:
    """A group that is not acknowledged yet."""

    __slots__ = ("arrays", "done", "header", "permit", "sent", "started")  # hot: one for each push

    def __init__(self, header: bytes, arrays: Sequence[Frame], permit: str) -> None:
        self.header = header
        self.arrays = arrays
        self.permit = permit
        self.sent = False
        self.started = time.monotonic()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Link:
    """A pusher's connection to one head."""

    def __init__(
        self, *, worker: str, head: str, socket: ClientSocket, beat_seconds: float, warn_seconds: float
    ) -> None:
        self._head = head
        self._worker = worker
        self._warn_seconds = warn_seconds
        self._pending: dict[int, _Pending] = {}  # the oldest first
        self._offered: list[int] = []
        self._withdrawn: list[int] = []
        self._warned = -math.inf
        self._reply = Reply()
        """The head's last reply."""
        self._under_way = 0
        """Number of pending groups that were sent."""
        self._flushing: asyncio.Handle | None = None
        self._socket = socket
        self._tasks = [
            essential.begin(self._receive(), name=f"receiving of the replies of {head}"),
            essential.begin(self._watch(beat_seconds), name=f"beats for {head}"),
        ]

    async def push(self, seq: int, item: _Pending) -> None:
        while (twin := self._pending.get(seq)) is not None:
            await asyncio.wait([twin.done])
            if not twin.done.cancelled():
                return twin.done.result()
        self._pending[seq] = item
        if self._under_way < self._reply.eager:
            self._flush()  # a withdrawal of the same group goes first
            self._send(item)
        else:
            self._offer([seq])
        try:
            await item.done
        finally:
            if self._pending.get(seq) is item:
                self._remove(seq)
                self._withdrawn.append(seq)
                self._flush_soon()
        return None

    def close(self) -> list[asyncio.Task[None]]:
        """Return the link's tasks, which the caller cancels."""
        self._withdrawn.extend(self._pending)
        self._offered.clear()
        self._flush()
        self._socket.close()
        self._fail(PeerLost, f"the pusher was closed before {self._head} stored it")
        return self._tasks

    def _offer(self, seqs: Iterable[int]) -> None:
        self._offered.extend(seqs)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Send all offers and withdrawals at the end of this turn of the event loop, in one message."""
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        while self._offered or self._withdrawn:
            waiting = [seq for seq in self._offered[:SEQS_PER_ASK] if seq in self._pending]
            offered = [(seq, self._pending[seq].permit) for seq in waiting]
            ask = Ask(offered=offered, withdrawn=self._withdrawn[:SEQS_PER_ASK])
            del self._offered[:SEQS_PER_ASK], self._withdrawn[:SEQS_PER_ASK]
            self._socket.session.send(_encoder.encode(ask))

    async def _receive(self) -> None:
        while True:
            await self._socket.arrived()
            try:
                for message in self._socket.messages():
                    self._handle(message)
            except PeerLost as rejected:
                self._fail(WireError, f"{self._head}: {rejected}")

    def _handle(self, message: msgspec.Raw) -> None:
        try:
            reply = self._reply = _decoder.decode(message)
        except UNDECODABLE as error:
            log.error("%s: %s sent something else than a Reply: %s", self._worker, self._head, error)
            return
        for seq in reply.stored:
            if (item := self._remove(seq)) is not None:
                _resolve(item.done, None)
        for refusal in reply.refused:
            refused = WireError(f"{self._head} refused a message: {refusal.reason}")
            if (item := self._remove(refusal.seq)) is not None:
                _resolve(item.done, refused)
            else:
                log.error("%s: %s", self._worker, refused)
        for seq in reply.send:
            if (item := self._pending.get(seq)) is not None:
                self._send(item)
            else:
                self._withdrawn.append(seq)
                self._flush_soon()
        if reply.offer_again:
            self._offer(self._pending)

    def _remove(self, seq: int) -> _Pending | None:
        """Remove `seq`, which is stored, rejected or given up, and return it if it was pending."""
        item = self._pending.pop(seq, None)
        self._under_way -= item is not None and item.sent
        return item

    def _send(self, item: _Pending) -> None:
        self._under_way += not item.sent
        item.sent = True
        self._socket.session.send(item.header, item.arrays)

    def _fail(self, kind: type[StreamRLError], reason: str) -> None:
        """Fail all pending groups."""
        for seq in list(self._pending):
            if (item := self._remove(seq)) is not None:
                _resolve(item.done, kind(f"group {seq}: {reason}"))

    async def _watch(self, beat_seconds: float) -> None:
        """Send beats while groups are pending; warn about a group that waits for `warn_seconds`."""
        while True:
            await asyncio.sleep(beat_seconds)
            if not self._pending:
                continue
            self._socket.session.beat()
            now = time.monotonic()
            seq, oldest = next(iter(self._pending.items()))
            if min(now - oldest.started, now - self._warned) >= self._warn_seconds:
                self._warned = now
                log.warning(
                    "%s waits for %s; oldest seq %d for %.0f s",
                    *(self._worker, self._awaited(now), seq, now - oldest.started),
                )

    def _awaited(self, now: float) -> str:
        heard_at = self._socket.heard_at
        if now - heard_at < SILENT_SECONDS:
            return (
                f"credit of {self._head}: {self._reply.taken} of {self._reply.capacity} places taken there, "
                f"{len(self._pending)} groups wait here"
            )
        silence = "has not replied yet" if heard_at < 0 else f"is silent for {now - heard_at:.0f} s"
        return f"{self._head}, which {silence} (is its port open to this machine?): {len(self._pending)} groups"


def _resolve(done: asyncio.Future[None], error: StreamRLError | None) -> None:
    if done.done():  # the pusher's caller was cancelled
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
