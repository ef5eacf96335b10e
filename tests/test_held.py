"""Held groups against the plain definition: sort and filter everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.ledger import HeldGroups
from streamrl.types import SampleMeta

seqs = st.integers(0, 12)


def meta(seq: int, versions: list[int]) -> SampleMeta:
    return SampleMeta(
        seq=seq,
        head=0,
        worker="rollout/0",
        size=1,
        tokens=8,
        rewards=[0.0],
        response_lengths=[4],
        version_counts=dict.fromkeys(versions, 2),
        generation_seconds=0.0,
    )


@given(st.lists(st.tuples(seqs, st.none() | st.lists(st.integers(0, 5), min_size=1)), max_size=40), seqs)
def test_groups_are_found_by_order_and_by_age(changes: list[tuple[int, list[int] | None]], count: int) -> None:
    held = HeldGroups()
    plain: dict[int, SampleMeta] = {}
    for seq, versions in changes:
        if versions is None:
            assert held.pop(seq, None) == plain.pop(seq, None)
        else:
            held[seq] = plain[seq] = meta(seq, versions)
        assert held == plain
    for version in range(7):
        old = [seq for seq in sorted(plain) if plain[seq].oldest_version < version]
        assert held.older_than(version) == old
        assert held.oldest(count, but=old) == [seq for seq in sorted(plain) if seq not in old][:count]


def test_no_memory_of_groups_that_left() -> None:
    held = HeldGroups()
    queue = held._order
    for seq in range(1000):
        held[seq] = meta(seq, [seq])
        if seq >= 10:
            del held[seq - 10]
    assert (len(held), len(held._by_oldest), len(queue._heap)) == (10, 10, 10)
