"""Groups that are held until they are trained on or dropped, in admission order and by age. Pure.

Nothing here looks at all groups: adding, removing and asking cost the same, but for a logarithm,
however many are held.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

from streamrl.types import SampleMeta


class SeqQueue:
    """A set of sequence numbers of which the smallest are at hand."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._heap: list[int] = []  # of all members; those removed stay until they are the smallest

    def __len__(self) -> int:
        return len(self._members)

    def add(self, seq: int) -> None:
        """`seq` is in the set."""
        if seq not in self._members:
            self._members.add(seq)
            heapq.heappush(self._heap, seq)

    def discard(self, seq: int) -> None:
        """`seq` is not in the set."""
        self._members.discard(seq)
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)

    def pop(self, count: int) -> list[int]:
        """The smallest, up to `count`, ascending; they are no longer in the set."""
        popped: list[int] = []
        while self._heap and len(popped) < count:
            seq = heapq.heappop(self._heap)
            if seq in self._members:
                self._members.remove(seq)
                popped.append(seq)
        return popped

    def smallest(self, count: int) -> list[int]:
        """The smallest, up to `count`, ascending."""
        found = self.pop(count)
        for seq in found:
            self.add(seq)
        return found


class HeldGroups(MutableMapping[int, SampleMeta]):
    """Metadata by sequence number; iterates in the order of arrival."""

    def __init__(self, metas: Mapping[int, SampleMeta] | None = None) -> None:
        self._metas: dict[int, SampleMeta] = {}
        self._order = SeqQueue()
        self._by_oldest: dict[int, set[int]] = {}  # oldest policy version → groups
        self.update(metas or {})

    def __getitem__(self, seq: int) -> SampleMeta:
        return self._metas[seq]

    def __contains__(self, seq: object) -> bool:
        return seq in self._metas

    def __iter__(self) -> Iterator[int]:
        return iter(self._metas)

    def __len__(self) -> int:
        return len(self._metas)

    def __setitem__(self, seq: int, meta: SampleMeta) -> None:
        if seq in self._metas:
            del self[seq]
        self._metas[seq] = meta
        self._order.add(seq)
        self._by_oldest.setdefault(meta.oldest_version, set()).add(seq)

    def __delitem__(self, seq: int) -> None:
        oldest = self._metas.pop(seq).oldest_version
        self._order.discard(seq)
        self._by_oldest[oldest].remove(seq)
        if not self._by_oldest[oldest]:
            del self._by_oldest[oldest]

    def oldest(self, count: int, *, but: Iterable[int] = ()) -> list[int]:
        """The first `count` groups in admission order without those in `but`; fewer when there are no more."""
        left_out = set(but)
        candidates = self._order.smallest(count + len(left_out))
        return [seq for seq in candidates if seq not in left_out][:count]

    def older_than(self, policy_version: int) -> list[int]:
        """Groups with a token from before `policy_version`, in admission order."""
        found = [seqs for version, seqs in self._by_oldest.items() if version < policy_version]
        return sorted(seq for seqs in found for seq in seqs)
