"""The groups that have reached one data-parallel head and wait to be trained on.

`StreamDataset` owns the groups' arrays and the record of every sequence number that it stored. A `GroupPuller`
(`transport/puller.py`) delivers the groups. Invariant: each sequence number is stored at most once in a run, unless its
prompt was returned to be generated again (`forget`); and no more than `capacity_groups` are held at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

from streamrl.seqs import SeqSet
from streamrl.transport import codec
from streamrl.types import SampleMeta, TrajectoryGroup


class StreamDataset:
    """Holds groups from the time they are stored until they are discarded. Thread-safe."""

    def __init__(
        self,
        *,
        rank: int,
        capacity_groups: int,
        on_stored: Callable[[SampleMeta], None] | None = None,
        special: Collection[int] = (),
    ) -> None:
        """`rank`: of the model worker that holds it. `capacity_groups`: maximum number of held groups. `on_stored` is
        called with each stored group's metadata, in the thread that stored it and before the group is acknowledged.
        `special`: token ids to count, as in `special_counts`."""
        self.rank = rank
        self.on_stored = on_stored
        self.capacity_groups = capacity_groups
        self._special = special
        self._on_freed: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._groups: dict[int, TrajectoryGroup] = {}
        self._known = SeqSet()
        self._stored = 0
        self._duplicated = 0
        self._refused = 0
        self._bytes_held = 0

    def __len__(self) -> int:
        """Return the number of held groups."""
        return len(self._groups)

    def knows(self, seq: int) -> bool:
        """Whether `seq` was stored here, even if it was discarded as trained since."""
        with self._lock:
            return seq in self._known

    def offer(self, group: TrajectoryGroup) -> bool:
        """Store `group` (validated by the codec) unless its `seq` is known. Return False if no place is free for it."""
        with self._lock:
            if group.seq in self._known:
                self._duplicated += 1
                return True
            if len(self._groups) >= self.capacity_groups:
                return False
            meta = SampleMeta.of(group, head=self.rank, special=self._special)
            self._known.add(group.seq)
            self._groups[group.seq] = group
            self._stored += 1
            self._bytes_held += codec.group_bytes(group)
        if self.on_stored is not None:
            self.on_stored(meta)
        return True

    def count_refused(self) -> None:
        """Count a message that broke the wire format."""
        with self._lock:
            self._refused += 1

    def find(self, seq: int) -> TrajectoryGroup | None:
        """Return the group `seq`; None if it is not held."""
        with self._lock:
            return self._groups.get(seq)

    def discard(self, seqs: Iterable[int], *, forget: bool) -> None:
        """Discard held groups; raises `KeyError`, and keeps all, if one is not held.

        `forget=False`: they were trained on, and later copies are duplicates. `forget=True`: their prompts are returned
        to be generated again, so the same sequence numbers may come again.
        """
        with self._lock:
            unwanted = set(seqs)
            self._check_held(unwanted)
            for seq in unwanted:
                self._bytes_held -= codec.group_bytes(self._groups.pop(seq))
                if forget:
                    self._known.discard(seq)
        if self._on_freed is not None:
            self._on_freed()

    def restore(self, done_with: Iterable[tuple[int, int]]) -> None:
        """Mark ranges (first, last + 1) of sequence numbers as known, before anything is stored: a resumed run has
        trained on them."""
        with self._lock:
            for first, end in done_with:
                for seq in range(first, end):
                    self._known.add(seq)

    def stats(self) -> dict[str, float]:
        """Return counters for heartbeats."""
        with self._lock:
            return {
                "groups_stored_total": self._stored,
                "groups_duplicated_total": self._duplicated,
                "groups_refused_total": self._refused,
                "groups_held": len(self._groups),
                "bytes_held": self._bytes_held,
            }

    def notify_freed(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called, in the discarding thread, whenever places become free."""
        self._on_freed = listener

    def _check_held(self, seqs: Iterable[int]) -> None:
        missing = sorted(seq for seq in seqs if seq not in self._groups)
        if missing:
            raise KeyError(f"head {self.rank} holds {len(self._groups)} groups, but not {missing[:10]}")
