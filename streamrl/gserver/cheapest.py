"""The cheapest of many whose costs change all the time, at the price of a logarithm. Pure."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Item = TypeVar("Item")

SLACK = 64
"""Outdated entries that are kept beside twice the number of valid ones."""


class Cheapest(Generic[Item]):
    """Items by integer key, each with a cost; of equal costs the smaller key is the cheaper."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[float, Item]] = {}
        self._heap: list[tuple[float, int]] = []  # may hold costs that are outdated

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: int) -> bool:
        return key in self._items

    def put(self, key: int, cost: float, item: Item) -> None:
        """`item` has this cost now."""
        known = self._items.get(key)
        self._items[key] = (cost, item)
        if known is None or known[0] != cost:
            heapq.heappush(self._heap, (cost, key))
            if len(self._heap) > 2 * len(self._items) + SLACK:
                self._heap = [(cost, key) for key, (cost, _) in self._items.items()]
                heapq.heapify(self._heap)

    def remove(self, key: int) -> None:
        """There is no such item, or no longer."""
        self._items.pop(key, None)

    def best(self, *, but: int | None = None) -> Item | None:
        """The cheapest item with another key than `but`."""
        aside: tuple[float, int] | None = None
        found: Item | None = None
        while self._heap:
            cost, key = self._heap[0]
            known = self._items.get(key)
            if known is not None and known[0] == cost:
                if key != but:
                    found = known[1]
                    break
                aside = cost, key
            heapq.heappop(self._heap)
        if aside is not None:
            heapq.heappush(self._heap, aside)
        return found
