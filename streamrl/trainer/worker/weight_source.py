"""The policy's weights, spread over the trainer's ranks, as the publisher on rank 0 sees them.

Either rank 0 reads them whole, one after another (`WeightSource.weights`), or several ranks each broadcast a part
(`Senders`): then each weight has one sender, which gathers it and sends it in a process group of its own, and the bytes
over the link of any one of them are a fraction of all.

Senders send at once, or in turn: bucket by bucket in one order, which all ranks and the receivers know, each when the
one before it is through. A bucket's turn comes when the last of its weights has been gathered, so that no rank waits
for its turn while another needs it for a gather.

Rank 0 says what comes next and all ranks do it, in the same order on every rank. Invariant: a pass over the weights
that breaks off on one rank is drained there, so all ranks take part in every collective of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.errors import PublicationError
from streamrl.trainer.backends.base import WholeWeights
from streamrl.transport.collective import Broadcaster, Bucket
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
        in_turn: bool = False,
    ) -> None:
        """Collective. `timeout_seconds`: the longest time between two orders. `dtype`: as which gservers get the
        weights. `own`: what sends this rank's part where several ranks do, at most `most_senders` of them. `in_turn`:
        whether they send one bucket after another; `own` then has to have `whole_buckets`."""
        self._model = model
        self._rank = rank
        self._world = world
        self._dtype = dtype
        self._own = own
        self._senders = model.weight_senders(most=most_senders)
        """The rank that sends it, for each of `specs`."""
        self._ends = _bucket_ends(self.specs(), self._senders, own.buckets) if in_turn and own is not None else {}
        """With turns: place of the last weight of each bucket → the rank that sends it, in order."""
        self._part = _RankWeights(
            model, rank=rank, senders=self._senders, dtype=dtype, ends=self._ends, hand_over=self._hand_over
        )
        self._group = None
        if world > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the Hugging Face name and shape of each weight, in the order of `weights`."""
        return self._model.weight_specs()

    @property
    def turns(self) -> list[int]:
        """As in `control.Broadcast`."""
        senders = sorted(set(self._senders))
        return [senders.index(rank) for rank in self._ends.values()]

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
                own.prepare(version, self._part)
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
            self._part.give_others()
            return Sent()
        number = senders.index(self._rank)
        mine = msgspec.structs.replace(
            begin,
            group_name=group_of_sender(begin.group_name, number),
            first_buckets=begin.first_buckets[number : number + 1],
        )
        error, checksums = "", {}
        self._part.was_read = False
        try:
            checksums = own.send(mine)
        except PublicationError as failure:
            error = str(failure)
            if not self._part.was_read:  # it has not met the gservers
                self._part.give_others()
        return Sent(checksums=checksums, error=error, bytes=own.sent_bytes, numbers=own.sent_numbers)

    def _hand_over(self, failed: bool) -> bool:
        """End a turn; return whether any rank has `failed` to send. Collective."""
        any_failed = torch.tensor(int(failed))
        if self._group is not None:
            dist.all_reduce(any_failed, op=dist.ReduceOp.MAX, group=self._group)
        return bool(any_failed)

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
        return msgspec.structs.replace(found[0], senders=senders, base=base, turns=self._source.turns)

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


class _RankWeights:
    """The weights that one rank sends; a `transport.collective.Weights`."""

    def __init__(
        self,
        model: WholeWeights,
        *,
        rank: int,
        senders: Sequence[int],
        dtype: torch.dtype,
        ends: Collection[int],
        hand_over: Callable[[bool], bool],
    ) -> None:
        """`ends`: the places of weights behind which a turn ends, and all ranks `hand_over` (`WeightSource`)."""
        self._model = model
        self._rank = rank
        self._senders = senders
        self._dtype = dtype
        self._ends = ends
        self._hand_over = hand_over
        self.was_read = False
        """Whether this rank has begun to iterate since it was set to False."""
        self._failed = False
        """Whether this rank could not send something."""
        self._given_up = False
        """Whether any rank could not: nothing more is sent."""

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        every = zip(self._model.weight_specs(), self._senders, strict=True)
        return [spec for spec, sender in every if sender == self._rank]

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """Collective: every rank iterates over its part, to its end if all of it was sent. Closing the iterator early
        still gives the others theirs."""
        self.was_read, self._failed, self._given_up = True, False, False
        every = _drained(self._taking_turns(self._model.gather_weights(dtype=self._dtype, to=self._senders)))
        try:
            for sender, weight in zip(self._senders, every, strict=True):
                if sender != self._rank:
                    continue
                if self._given_up:
                    raise PublicationError("another model worker could not send its part")
                self._failed = True  # unless this is asked for more
                yield weight
                self._failed = False
        finally:
            every.close()

    def give_others(self) -> None:
        """Take part in a pass for the sake of the others: this rank sends nothing. Collective."""
        weights = self.weights()
        next(weights, None)
        weights.close()

    def _taking_turns(self, found: Iterable[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor]]:
        for place, weight in enumerate(found):
            yield weight
            if place in self._ends:
                self._given_up |= self._hand_over(self._failed)


def _drained(found: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor]]:
    """Yield what is `found`; closing the iterator early takes the rest."""
    try:
        for weight in found:  # noqa: UP028 (`yield from` would close `found` together with this iterator)
            yield weight
    finally:
        for _ in found:
            pass


def _bucket_ends(
    specs: Bucket, senders: Sequence[int], buckets: Callable[[Bucket], Sequence[Bucket]]
) -> dict[int, int]:
    """Return the place in `specs` of the last weight of each bucket → the rank that sends the bucket, in order.
    `buckets` cuts what one rank sends."""
    places = {name: place for place, (name, _) in enumerate(specs)}
    ends: dict[int, int] = {}
    for rank in set(senders):
        part = [spec for spec, sender in zip(specs, senders, strict=True) if sender == rank]
        ends |= {places[bucket[-1][0]]: rank for bucket in buckets(part)}
    return dict(sorted(ends.items()))
