"""The credit book under any sequence of events: places are never oversold, and nobody is forgotten."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streamrl.transport.puller import CreditBook

SILENCE = 10.0
senders = st.sampled_from([b"a", b"b", b"c"])
seqs = st.integers(0, 12)


class Book(RuleBasedStateMachine):
    """A head with a credit book; groups that are granted arrive, or do not."""

    @initialize(capacity=st.integers(1, 5))
    def open(self, capacity: int) -> None:
        self.book = CreditBook(capacity=capacity, silence_seconds=SILENCE)
        self.capacity = capacity
        self.now = 0.0
        self.stored: set[int] = set()
        self.known: set[int] = set()
        self.waiting: dict[int, list[bytes]] = {}
        self.reserved: dict[int, bytes] = {}
        self.heard: dict[bytes, float] = {}

    def hear(self, sender: bytes) -> None:
        self.book.hear(sender, now=self.now)
        self.heard[sender] = self.now

    @rule(sender=senders, seq=seqs)
    def offer(self, sender: bytes, seq: int) -> None:
        self.hear(sender)
        if seq in self.known:
            return
        mine = self.reserved.get(seq) == sender
        assert self.book.offer(sender, seq) is mine
        if not mine and sender not in self.waiting.setdefault(seq, []):
            self.waiting[seq].append(sender)

    @rule(sender=senders, seq=seqs)
    def withdraw(self, sender: bytes, seq: int) -> None:
        self.hear(sender)
        self.book.withdraw(sender, seq)
        self.drop(sender, seq)

    def drop(self, sender: bytes, seq: int) -> None:
        if self.reserved.get(seq) == sender:
            del self.reserved[seq]
        if sender in self.waiting.get(seq, []):
            self.waiting[seq].remove(sender)
            if not self.waiting[seq]:
                del self.waiting[seq]

    @rule()
    def grant(self) -> None:
        """Lowest sequence number first, first come first served among its owners, until all is full."""
        expected = []
        for seq in sorted(self.waiting):
            if seq not in self.reserved and len(self.stored) + len(self.reserved) < self.capacity:
                sender = self.waiting[seq][0]
                self.drop(sender, seq)
                self.reserved[seq] = sender
                expected.append((sender, seq))
        assert self.book.grant(stored=len(self.stored)) == expected

    @rule(sender=senders, seq=seqs)
    def arrive(self, sender: bytes, seq: int) -> None:
        self.hear(sender)
        if seq in self.known:
            return
        fits = seq in self.reserved or len(self.stored) + len(self.reserved) < self.capacity
        assert self.book.admits(seq, stored=len(self.stored)) is fits
        if fits:
            assert self.book.note_stored(seq) == self.waiting.pop(seq, [])
            self.reserved.pop(seq, None)
            self.stored.add(seq)
            self.known.add(seq)

    @rule(seq=seqs, forget=st.booleans())
    def discard(self, seq: int, forget: bool) -> None:
        self.stored.discard(seq)
        if forget and seq not in self.stored:
            self.known.discard(seq)

    @rule(seconds=st.integers(0, 32).map(lambda quarters: quarters / 4))
    def time_passes(self, seconds: float) -> None:
        """By quarters of a second, whose sums and differences are exact."""
        self.now += seconds
        silent = {sender for sender, heard in self.heard.items() if self.now - heard >= SILENCE}
        expected = {s: list(self.reserved.values()).count(s) for s in silent}
        assert self.book.forget_silent(now=self.now) == expected
        for sender in silent:
            del self.heard[sender]
            for seq in range(13):
                self.drop(sender, seq)

    @invariant()
    def places_are_not_oversold(self) -> None:
        assert len(self.stored) + self.book.reserved <= self.capacity
        assert self.book.reserved == len(self.reserved)
        assert self.book.waiting == len(self.waiting.keys() - self.reserved.keys())

    @invariant()
    def unasked_groups_fit(self) -> None:
        share = self.book.eager(stored=len(self.stored))
        assert 0 <= share * max(1, len(self.heard)) <= self.capacity - len(self.stored) - len(self.reserved)

    @invariant()
    def silence_is_due_in_time(self) -> None:
        due = self.book.next_silence()
        assert due == (min(self.heard.values()) + SILENCE if self.heard else None)


TestCreditBook = Book.TestCase


def test_a_place_goes_to_the_next_owner_when_the_first_falls_silent() -> None:
    book = CreditBook(capacity=1, silence_seconds=SILENCE)
    book.hear(b"dead", now=0.0)
    book.offer(b"dead", 7)
    assert book.grant(stored=0) == [(b"dead", 7)]
    book.hear(b"alive", now=5.0)
    book.offer(b"alive", 7)
    assert book.grant(stored=0) == []
    assert book.forget_silent(now=10.0) == {b"dead": 1}
    assert book.grant(stored=0) == [(b"alive", 7)]


def test_a_silent_sender_is_counted_though_another_silent_one_waits_for_the_same_group() -> None:
    book = CreditBook(capacity=1, silence_seconds=SILENCE)
    for sender in (b"first", b"second"):
        book.hear(sender, now=0.0)
        book.offer(sender, 1)
        book.grant(stored=0)
    assert book.forget_silent(now=10.0) == {b"first": 1, b"second": 0}
    assert (book.reserved, book.waiting) == (0, 0)
    assert book.grant(stored=0) == []
