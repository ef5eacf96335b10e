"""Collections of sequence numbers against Python's own sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from streamrl.seqs import SeqQueue, SeqSet

seqs = st.integers(0, 12)
sparse_seqs = st.one_of(st.integers(0, 40), st.integers(8180, 8200), st.integers(0, 2**60))


@given(st.lists(st.tuples(st.booleans(), sparse_seqs)))
def test_seq_set_is_a_set(changes: list[tuple[bool, int]]) -> None:
    ours, plain = SeqSet(), set[int]()
    for add, seq in changes:
        if add:
            ours.add(seq)
            plain.add(seq)
        else:
            ours.discard(seq)
            plain.discard(seq)
        assert (seq in ours) is (seq in plain)
        assert len(ours) == len(plain)
    ranges = ours.ranges()
    assert [seq for first, end in ranges for seq in range(first, end)] == sorted(plain)
    assert all(before[1] < after[0] for before, after in pairwise(ranges)), "not merged"


def test_seq_set_stays_small_however_long_the_run() -> None:
    ours = SeqSet()
    for seq in range(0, 200_000, 2):  # every other one was rejected
        ours.add(seq)
    assert sum(map(len, ours._chunks.values())) <= 200_000 / 8 + 1024


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "pop", "smallest"]), seqs), max_size=60))
def test_a_queue_is_a_sorted_set(calls: list[tuple[str, int]]) -> None:
    queue = SeqQueue()
    members: set[int] = set()
    for call, number in calls:
        match call:
            case "add":
                queue.add(number)
                members.add(number)
            case "discard":
                queue.discard(number)
                members.discard(number)
            case "pop":
                popped = queue.pop(number)
                assert popped == sorted(members)[:number]
                members.difference_update(popped)
            case _:
                assert queue.smallest(number) == sorted(members)[:number]
        assert (len(queue), number in queue) == (len(members), number in members)
