"""The groups that are ready for a batch, against the plain definition: sort and filter everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.ledger import ReadyGroups

seqs = st.integers(0, 12)


@given(st.lists(st.tuples(seqs, st.none() | st.integers(0, 5)), max_size=40), seqs)
def test_groups_are_found_by_order_and_by_age(changes: list[tuple[int, int | None]], count: int) -> None:
    ready = ReadyGroups()
    plain: dict[int, int] = {}
    for seq, version in changes:
        if version is None:
            ready.discard(seq)
            plain.pop(seq, None)
        else:
            ready.add(seq, version)
            plain[seq] = version
        assert len(ready) == len(plain)
        assert [seq in ready for seq in range(13)] == [seq in plain for seq in range(13)]
    for version in range(7):
        old = [seq for seq in sorted(plain) if plain[seq] < version]
        assert ready.older_than(version) == old
        assert ready.oldest(count, but=old) == [seq for seq in sorted(plain) if seq not in old][:count]


def test_no_memory_of_groups_that_left() -> None:
    ready = ReadyGroups()
    queue = ready._order
    for seq in range(1000):
        ready.add(seq, seq)
        if seq >= 10:
            ready.discard(seq - 10)
    assert (len(ready), len(ready._by_oldest), len(queue._heap)) == (10, 10, 10)
