"""Collections of sequence numbers: a set that stays small in a run of any length, and a queue of the smallest.

A sequence number `seq` is the position of a group's prompt in the run's endless stream of prompts, from 0. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

_CHUNK_BITS = 13
_CHUNK_BYTES = 1 << (_CHUNK_BITS - 3)


class SeqSet:
    """A set that takes one bit per sequence number, in a run of any length."""

    def __init__(self, seqs: Iterable[int] = ()) -> None:
        self._chunks: dict[int, bytearray] = {}
        self._count = 0
        for seq in seqs:
            self.add(seq)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, seq: int) -> bool:
        chunk = self._chunks.get(seq >> _CHUNK_BITS)
        return chunk is not None and bool(chunk[seq >> 3 & _CHUNK_BYTES - 1] >> (seq & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        """Yield the members, ascending."""
        for first, end in self.ranges():
            yield from range(first, end)

    def add(self, seq: int) -> None:
        """Add `seq`; no change if it is present."""
        if seq not in self:
            chunk = self._chunks.setdefault(seq >> _CHUNK_BITS, bytearray(_CHUNK_BYTES))
            chunk[seq >> 3 & _CHUNK_BYTES - 1] |= 1 << (seq & 7)
            self._count += 1

    def discard(self, seq: int) -> None:
        """Remove `seq`; no change if it is absent."""
        if seq in self:
            self._chunks[seq >> _CHUNK_BITS][seq >> 3 & _CHUNK_BYTES - 1] ^= 1 << (seq & 7)
            self._count -= 1

    def ranges(self) -> list[tuple[int, int]]:
        """Return the members as ranges (first, last + 1), ascending."""
        found: list[tuple[int, int]] = []
        for number in sorted(self._chunks):
            base = number << _CHUNK_BITS
            bits = int.from_bytes(self._chunks[number], "little")
            while bits:
                skip = (bits & -bits).bit_length() - 1
                bits >>= skip
                run = (~bits & bits + 1).bit_length() - 1
                bits >>= run
                first = base + skip
                base = first + run
                if found and found[-1][1] == first:
                    found[-1] = (found[-1][0], base)
                else:
                    found.append((first, base))
        return found


class SeqQueue:
    """A set whose smallest members are found in logarithmic time."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._heap: list[int] = []  # all members; removed ones stay until they are the smallest

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq: int) -> bool:
        return seq in self._members

    def add(self, seq: int) -> None:
        """Add `seq`; no change if it is present."""
        if seq not in self._members:
            self._members.add(seq)
            heapq.heappush(self._heap, seq)

    def discard(self, seq: int) -> None:
        """Remove `seq`; no change if it is absent."""
        self._members.discard(seq)
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)

    def pop(self, count: int) -> list[int]:
        """Remove and return the smallest members, at most `count`, ascending."""
        popped: list[int] = []
        while self._heap and len(popped) < count:
            seq = heapq.heappop(self._heap)
            if seq in self._members:
                self._members.remove(seq)
                popped.append(seq)
        return popped

    def smallest(self, count: int) -> list[int]:
        """Return the smallest members, at most `count`, ascending."""
        found = self.pop(count)
        for seq in found:
            self.add(seq)
        return found
