"""Which prompt prefixes the cache still holds, so that siblings and later turns share them."""

from __future__ import annotations

import msgspec


class Resident(msgspec.Struct, frozen=True):
    """What lies in a slot, running or finished: keys and values of all `tokens` but the last."""

    tokens: list[int]
    """Grows with the request that runs in the slot."""
    epoch: int
    """Of the weights that computed it."""


class Prefixes:
    """Contents of every slot. What was computed by earlier weights is never shared."""

    def __init__(self) -> None:
        self.epoch = 0
        self._slots: list[Resident | None] = []

    def new_weights(self) -> None:
        self.epoch += 1

    def clear(self) -> None:
        self._slots.clear()

    def place(self, slot: int, tokens: list[int]) -> None:
        """`slot` now holds `tokens`, computed by the present weights."""
        self._put(slot, Resident(tokens, self.epoch))

    def move(self, source: int, target: int) -> None:
        """The contents of `source` were copied to `target`, where they go on growing."""
        self._put(target, self._slots[source])
        self._put(source, None)

    def remove(self, slot: int) -> None:
        self._put(slot, None)

    def longest(self, tokens: list[int], *, limit: int) -> tuple[int, int]:
        """The slot with the longest common prefix, and its length in tokens, `limit` at most."""
        best, length = -1, 0
        for slot, resident in enumerate(self._slots):
            if resident is None or resident.epoch != self.epoch:
                continue
            common = _common(resident.tokens, tokens, min(limit, len(resident.tokens) - 1))
            if common > length:
                best, length = slot, common
        return best, length

    def _put(self, slot: int, resident: Resident | None) -> None:
        if slot >= len(self._slots):
            self._slots.extend([None] * (slot + 1 - len(self._slots)))
        self._slots[slot] = resident


def _common(a: list[int], b: list[int], limit: int) -> int:
    """How many leading elements agree, `limit` at most; by halving, because slices compare fast."""
    if limit <= 0 or a[0] != b[0]:
        return 0
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
