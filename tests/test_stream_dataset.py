"""`StreamDataset`: stores once, holds until discarded, never more than it may."""

from __future__ import annotations

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streamrl.stream_dataset import StreamDataset
from streamrl.types import SampleMeta
from tests.groups import make_group


class Dataset(RuleBasedStateMachine):
    """A data set beside a plain model of it."""

    @initialize(capacity=st.integers(1, 4))
    def open(self, capacity: int) -> None:
        self.told: list[SampleMeta] = []
        self.freed = 0
        self.dataset = StreamDataset(rank=2, capacity_groups=capacity, on_stored=self.told.append)
        self.dataset.notify_freed(self.count_freed)
        self.capacity = capacity
        self.held: list[int] = []
        self.known: set[int] = set()
        self.stored = self.duplicated = 0

    def count_freed(self) -> None:
        self.freed += 1

    @rule(seq=st.integers(0, 9))
    def offer(self, seq: int) -> None:
        outcome = self.dataset.offer(make_group(seq))
        if seq in self.known:
            assert outcome
            self.duplicated += 1
        elif len(self.held) == self.capacity:
            assert not outcome
        else:
            assert outcome
            self.held.append(seq)
            self.known.add(seq)
            self.stored += 1
            assert self.told[-1].seq == seq
            assert self.told[-1].head == 2

    @rule(data=st.data(), forget=st.booleans())
    def discard(self, data: st.DataObject, forget: bool) -> None:
        seqs = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        freed = self.freed
        self.dataset.discard(seqs, forget=forget)
        assert self.freed == freed + 1
        self.held = [seq for seq in self.held if seq not in seqs]
        self.known -= set(seqs) if forget else set()

    @rule(seq=st.integers(0, 9))
    def ask_for_what_is_not_held(self, seq: int) -> None:
        if seq not in self.held:
            with pytest.raises(KeyError, match=rf"head 2 holds {len(self.held)} groups, but not \[{seq}\]"):
                self.dataset.discard([*self.held, seq], forget=False)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.dataset) == len(self.held) <= self.capacity
        found = [self.dataset.find(seq) for seq in range(10)]
        assert [group.seq for group in found if group is not None] == sorted(self.held)
        assert [seq for seq in range(10) if self.dataset.knows(seq)] == sorted(self.known)
        assert len(self.told) == self.stored
        group_bytes = 2 * 12 + 12 * 13
        assert self.dataset.stats() == {
            "groups_stored_total": self.stored,
            "groups_duplicated_total": self.duplicated,
            "groups_refused_total": 0,
            "groups_held": len(self.held),
            "bytes_held": len(self.held) * group_bytes,
        }


TestStreamDataset = Dataset.TestCase


def test_a_resumed_head_knows_what_was_trained_on() -> None:
    dataset = StreamDataset(rank=0, capacity_groups=9)
    dataset.restore([(0, 3), (5, 6)])
    assert [seq for seq in range(9) if dataset.knows(seq)] == [0, 1, 2, 5]
    assert dataset.offer(make_group(5))
    assert len(dataset) == 0


def test_many_threads_store_each_group_once() -> None:
    dataset = StreamDataset(rank=0, capacity_groups=200)

    def offer_all() -> None:
        assert all(dataset.offer(make_group(seq)) for seq in range(100))

    threads = [threading.Thread(target=offer_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = dataset.stats()
    assert (stats["groups_stored_total"], stats["groups_duplicated_total"]) == (100, 300)
