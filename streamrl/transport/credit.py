"""Credit of the stream: which sender may send which group to a head. Pure, without I/O or clocks.

A credit is a place reserved for one sequence number that a sender has offered. Stored and reserved groups together
never exceed the capacity. Three consequences:

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
from typing import Generic, TypeVar

from streamrl.transport.liveness import LastHeard, next_silence

Sender = TypeVar("Sender")


class CreditBook(Generic[Sender]):
    """The reservations and offers of one head; times are in seconds."""

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
