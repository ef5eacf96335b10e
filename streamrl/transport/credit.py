"""Who may send which group: a pure book of one DP head's free places, without I/O or clocks.

A credit is a place reserved for one sequence number that a sender said it has in hand. Held and
reserved groups together never exceed the capacity. Three consequences:

- a credit is never hoarded: whoever has no group has no credit, so with `over_age = "wait"` and a
  capacity of (η + 1) · P, which is as many groups as can be alive at once, every group in hand gets
  its place at once, however many senders there are;
- when places are short, the lowest sequence number goes first, whoever has it: the order in which
  batches need groups, in which no sender starves another;
- a sender that stays silent for `silence_seconds` loses its reservations and its turn.

While there is room to spare, asking would cost a round trip for nothing: `eager` says how many
groups each sender may have under way unasked. It reserves nothing, so it withholds nothing from
anybody; should such a group find no place after all, it queues up as if it had been offered.
"""

from __future__ import annotations

import heapq


class CreditBook:
    """Reservations and waiting offers; a sender is named by any bytes."""

    def __init__(self, *, capacity: int, silence_seconds: float) -> None:
        self.capacity = capacity
        self.silence_seconds = silence_seconds
        self._reserved: dict[int, bytes] = {}
        self._waiting: dict[int, dict[bytes, None]] = {}
        self._order: list[int] = []  # heap; every seq that waits without reservation is in it, others may be
        self._ordered: set[int] = set()  # what is in the heap
        self._heard: dict[bytes, float] = {}

    @property
    def reserved(self) -> int:
        """Places reserved for groups that have not arrived yet."""
        return len(self._reserved)

    @property
    def waiting(self) -> int:
        """Sequence numbers that were offered and have no place yet."""
        return sum(1 for seq in self._waiting if seq not in self._reserved)

    def eager(self, *, held: int) -> int:
        """How many groups each sender may have under way unasked: its share of half the free places."""
        if self._waiting:
            return 0
        return (self.capacity - held - len(self._reserved)) // (2 * max(1, len(self._heard)))

    def hear(self, sender: bytes, *, now: float) -> None:
        """`sender` lives."""
        self._heard[sender] = now

    def offer(self, sender: bytes, seq: int) -> bool:
        """`sender` has `seq` in hand; True: it holds the reservation already and may send."""
        if self._reserved.get(seq) == sender:
            return True
        self._waiting.setdefault(seq, {})[sender] = None
        self._line_up(seq)
        return False

    def withdraw(self, sender: bytes, seq: int) -> None:
        """`sender` no longer has `seq`, or its group was refused."""
        if self._reserved.get(seq) == sender:
            self._release(seq)
        waiters = self._waiting.get(seq)
        if waiters is not None:
            waiters.pop(sender, None)
            if not waiters:
                del self._waiting[seq]

    def admits(self, seq: int, *, held: int) -> bool:
        """Whether a group that arrived may be stored: a place is reserved for it, or one is free."""
        return seq in self._reserved or held + len(self._reserved) < self.capacity

    def settle(self, seq: int) -> list[bytes]:
        """`seq` is stored; answers who else offered it, and need not send it any more."""
        self._reserved.pop(seq, None)
        return list(self._waiting.pop(seq, ()))

    def grant(self, *, held: int) -> list[tuple[bytes, int]]:
        """Reserve free places, lowest sequence number first; answers who may now send what."""
        grants: list[tuple[bytes, int]] = []
        while self._order and held + len(self._reserved) < self.capacity:
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
        """Take back what silent senders hold; answers how many reservations of each."""
        silent = {sender for sender, heard in self._heard.items() if now - heard >= self.silence_seconds}
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
        """When a sender has been silent for too long unless it is heard before; None: there is none."""
        return min(self._heard.values()) + self.silence_seconds if self._heard else None

    def _release(self, seq: int) -> None:
        del self._reserved[seq]
        if seq in self._waiting:
            self._line_up(seq)

    def _line_up(self, seq: int) -> None:
        if seq not in self._ordered:
            self._ordered.add(seq)
            heapq.heappush(self._order, seq)
