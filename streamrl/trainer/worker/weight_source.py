"""The policy's weights, spread over the trainer's ranks, as the publisher on rank 0 sees them.

Either rank 0 reads them whole, one after another (`WeightSource.weights`), or several ranks each broadcast a part
(`Senders`): then each weight has one sender, which gathers it and sends it in a process group of its own, and the bytes
over the link of any one of them are a fraction of all.

Rank 0 says what comes next and all ranks do it, in the same order on every rank. Invariant: a pass over the weights
that breaks off on one rank is drained there, so all ranks take part in every collective of it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.errors import PublicationError
from streamrl.trainer.backends.base import WholeWeights
from streamrl.transport.collective import Broadcaster
from streamrl.transport.control import Broadcast, PublishBeginReply, group_of_sender


class Pass(msgspec.Struct, frozen=True, tag="pass"):
    """Gather every weight on rank 0."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """The weights as they are now come next."""

    version: int


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """Say what this rank sends, and where it is met."""


class Send(msgspec.Struct, frozen=True, tag="send"):
    """Send this rank's part."""

    begin: PublishBeginReply


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The attempt failed."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Nothing more is to be done for this version."""


Order = Pass | Prepare | Announce | Send | Abort | End


class NothingToTell(msgspec.Struct, frozen=True, tag="done"):
    """There is nothing to tell."""


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """What one rank sent."""

    checksums: dict[str, str] = {}
    error: str = ""
    """Why it could not send all."""
    bytes: int = 0
    """As `Broadcaster.sent_bytes`: since it exists."""
    numbers: int = 0
    """As `Broadcaster.sent_numbers`."""


Reply = NothingToTell | Broadcast | Sent

_encode = msgspec.msgpack.Encoder().encode
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class WeightSource:
    """One for each rank."""

    def __init__(
        self,
        model: WholeWeights,
        *,
        rank: int,
        world: int,
        timeout_seconds: float,
        dtype: torch.dtype,
        own: Broadcaster | None = None,
        most_senders: int = 1,
    ) -> None:
        """Collective. `timeout_seconds`: the longest time between two orders. `dtype`: as which gservers get the
        weights. `own`: what sends this rank's part where several ranks do, at most `most_senders` of them."""
        self._model = model
        self._rank = rank
        self._world = world
        self._dtype = dtype
        self._own = own
        self._senders = model.weight_senders(most=most_senders)
        """The rank that sends it, for each of `specs`."""
        self._group = None
        if world > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the Hugging Face name and shape of each weight, in the order of `weights`."""
        return self._model.weight_specs()

    # On rank 0

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """Yield all weights. Closing the iterator early still takes the rest from the other ranks."""
        self._tell(Pass())
        yield from _drained(self._model.gather_weights(dtype=self._dtype))

    def ask(self, order: Order) -> list[Reply]:
        """Have every rank carry out `order`; return their replies, by rank. Raises `PublicationError` when a rank is
        gone."""
        try:
            self._tell(order)
            reply = self._carry_out(order)
            return [reply] if self._group is None else self._collect(reply)
        except RuntimeError as error:  # of torch's collectives
            raise PublicationError(f"a model worker does not take part in {type(order).__name__}: {error}") from error

    def end(self) -> None:
        """Nothing more is to be done for this version."""
        self._tell(End())

    # On the other ranks

    def serve(self) -> None:
        """Carry out what rank 0 says until it ends the version."""
        while not isinstance(order := self._told(), End):
            reply = self._carry_out(order)
            if not isinstance(order, Pass):
                self._collect(reply)

    def close(self) -> None:
        """Leave the weight group."""
        if self._own is not None:
            self._own.close()

    def _carry_out(self, order: Order) -> Reply:
        own = self._own
        match order:
            case Pass():
                for _ in self._model.gather_weights(dtype=self._dtype):
                    pass
            case Prepare(version) if own is not None:
                own.prepare(version, _Part(self._model, rank=self._rank, senders=self._senders, dtype=self._dtype))
            case Announce() if own is not None:
                return own.announce()
            case Send(begin) if own is not None:
                return self._send(own, begin)
            case Abort() if own is not None:
                own.abort()
        return NothingToTell()

    def _send(self, own: Broadcaster, begin: PublishBeginReply) -> Sent:
        senders = sorted(set(self._senders))
        if self._rank not in senders:
            for _ in self._model.gather_weights(dtype=self._dtype, to=self._senders):
                pass
            return Sent()
        number = senders.index(self._rank)
        mine = msgspec.structs.replace(
            begin,
            group_name=group_of_sender(begin.group_name, number),
            first_buckets=begin.first_buckets[number : number + 1],
        )
        error, checksums = "", {}
        try:
            checksums = own.send(mine)
        except PublicationError as failure:
            error = str(failure)
        return Sent(checksums=checksums, error=error, bytes=own.sent_bytes, numbers=own.sent_numbers)

    def _tell(self, order: Order) -> None:
        if self._group is not None:
            content = torch.frombuffer(bytearray(_encode(order)), dtype=torch.uint8)
            dist.broadcast(torch.tensor(len(content)), src=0, group=self._group)
            dist.broadcast(content, src=0, group=self._group)

    def _told(self) -> Order:
        length = torch.tensor(0)
        dist.broadcast(length, src=0, group=self._group)
        content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self._group)
        return _orders.decode(content.numpy().data)

    def _collect(self, reply: Reply) -> list[Reply]:
        """Return the replies of all ranks, on rank 0. Collective."""
        content = torch.frombuffer(bytearray(_encode(reply)), dtype=torch.uint8)
        lengths = [torch.tensor(0) for _ in range(self._world)]
        dist.all_gather(lengths, torch.tensor(len(content)), group=self._group)
        room = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        room[: len(content)] = content
        found = [torch.empty_like(room) for _ in range(self._world)] if self._rank == 0 else None
        dist.gather(room, found, dst=0, group=self._group)
        return [_replies.decode(c[:n].numpy().data) for c, n in zip(found or (), lengths, strict=False)]


class Senders:
    """A `Carrier` (`publisher.py`) in which several ranks broadcast; on rank 0."""

    reads_once = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.sent_bytes = 0
        self.sent_by_rank: list[int] = []
        """As `sent_bytes`, of each rank."""
        self.sent_numbers = 0
        self._source: WeightSource

    def prepare(self, version: int, weights: WeightSource) -> None:
        """These weights come next."""
        self._source = weights
        weights.ask(Prepare(version))

    def announce(self) -> Broadcast:
        """Return what each sender is to send, and where to meet for it."""
        found = [reply for reply in self._source.ask(Announce()) if isinstance(reply, Broadcast)]
        senders = [sender for reply in found for sender in reply.senders if sender.buckets]
        base = found[0].base if len({reply.base for reply in found if reply.senders[0].buckets}) == 1 else None
        return msgspec.structs.replace(found[0], senders=senders, base=base)

    def send(self, begin: PublishBeginReply) -> dict[str, str]:
        """Have all ranks send; return the checksum of each weight, by name."""
        sent = [reply for reply in self._source.ask(Send(begin)) if isinstance(reply, Sent)]
        self.sent_by_rank = [reply.bytes for reply in sent]
        self.sent_bytes = sum(self.sent_by_rank)
        self.sent_numbers = sum(reply.numbers for reply in sent)
        if errors := [f"rank {rank}: {reply.error}" for rank, reply in enumerate(sent) if reply.error]:
            raise PublicationError("; ".join(errors))
        return {name: sums for reply in sent for name, sums in reply.checksums.items()}

    def abort(self) -> None:
        """Have all ranks leave the group."""
        self._source.ask(Abort())

    def close(self) -> None:
        """Each rank's `WeightSource` leaves the group itself."""


class _Part:
    """The weights that one rank sends; a `transport.collective.Weights`."""

    def __init__(self, model: WholeWeights, *, rank: int, senders: Sequence[int], dtype: torch.dtype) -> None:
        self._model = model
        self._rank = rank
        self._senders = senders
        self._dtype = dtype

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        every = zip(self._model.weight_specs(), self._senders, strict=True)
        return [spec for spec, sender in every if sender == self._rank]

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """Collective: every rank iterates over its part. Closing the iterator early still gives the others theirs."""
        every = _drained(self._model.gather_weights(dtype=self._dtype, to=self._senders))
        try:
            for sender, weight in zip(self._senders, every, strict=True):
                if sender == self._rank:
                    yield weight
        finally:
            every.close()


def _drained(found: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor]]:
    """Yield what is `found`; closing the iterator early takes the rest."""
    try:
        for weight in found:  # noqa: UP028 (`yield from` would close `found` together with this iterator)
            yield weight
    finally:
        for _ in found:
            pass
