"""The prefix cache: what was computed is not computed again for siblings, later turns and resumed responses.

Role: knows which tokens' keys and values lie in the slots of running requests, and keeps those of finished ones
outside the slots, up to `capacity` bytes; the least recently used go first. Invariant: only what the present weights
computed is shared. From an update on, what was computed before serves only the requests that it belongs to (the pause
mode `in_place`), and nobody after them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from streamrl.gserver.embedded.cache import KVCache
from streamrl.gserver.embedded.prefix_tree import PrefixTree

LEAST_TOKENS = 8
"""Shorter sequences are not kept."""


class Held:
    """Keys and values of `tokens`: in a slot, or kept."""

    __slots__ = ("kept", "slot", "tokens")

    def __init__(self, tokens: Sequence[int], *, slot: int = -1, kept: Sequence[Tensor] = ()) -> None:
        self.tokens = tokens
        self.slot = slot
        """-1: not in a slot."""
        self.kept = kept
        """For each layer, as `KVCache.take` answers them."""

    @property
    def bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.kept)


class Prefixes:
    """All that can be shared; the cache's slots are filled from it."""

    def __init__(self, cache: KVCache, *, capacity: int) -> None:
        """`capacity`: bytes kept of finished requests; 0 keeps nothing."""
        self.kept_bytes = 0
        self._cache = cache
        self._capacity = capacity
        self._tree: PrefixTree[Held] = PrefixTree()
        self._slots: dict[int, Held] = {}
        self._kept: OrderedDict[int, Held] = OrderedDict()  # by id, least recently used first

    def clear(self) -> None:
        """Share nothing of what there is now, and free what was kept."""
        self._tree.clear()
        self._slots.clear()
        self._kept.clear()
        self.kept_bytes = 0

    def cached(self, tokens: Sequence[int], *, limit: int) -> int:
        """How many of the first `limit` tokens need not be computed."""
        return min(limit, self._tree.longest(tokens)[1])

    def fill(self, slot: int, tokens: Sequence[int], *, limit: int) -> int:
        """Put what is known of the first `limit` tokens into `slot`; answers how many there are."""
        held, length = self._tree.longest(tokens)
        length = min(limit, length)
        if held is not None and length:
            if held.slot < 0:
                self._cache.put(slot, held.kept, length)
                self._kept.move_to_end(id(held))
            elif held.slot != slot:
                self._cache.copy(held.slot, [slot], length)
        self.remove(slot)
        return length

    def place(self, slot: int, tokens: Sequence[int]) -> None:
        """`slot` now holds the keys and values of `tokens`, computed by the present weights."""
        self.remove(slot)
        self._slots[slot] = held = Held(list(tokens), slot=slot)
        self._tree.insert(held.tokens, held)

    def move(self, source: int, target: int) -> None:
        """The contents of `source` were copied to `target`."""
        self.remove(target)
        held = self._slots.pop(source, None)
        if held is not None:
            held.slot = target
            self._slots[target] = held

    def remove(self, slot: int) -> None:
        """The contents of `slot` are about to change."""
        held = self._slots.pop(slot, None)
        if held is not None:
            self._tree.remove(held.tokens, held)

    def finish(self, slot: int, tokens: Sequence[int]) -> None:
        """The request in `slot`, which holds `tokens`, ends: keep them, unless earlier weights computed some."""
        present = slot in self._slots
        self.remove(slot)
        if not present or len(tokens) < LEAST_TOKENS or not self._fits(len(tokens)):
            return
        known, length = self._tree.longest(tokens)
        if known is not None and known.slot < 0 and length == len(tokens):
            self._kept.move_to_end(id(known))
            return
        for earlier in self._tree.along(tokens):  # for example the turn before
            if earlier.slot < 0:
                self._forget(earlier)
        held = Held(list(tokens), kept=self._cache.take(slot, len(tokens)))
        self._kept[id(held)] = held
        self._tree.insert(held.tokens, held)
        self.kept_bytes += held.bytes
        while self.kept_bytes > self._capacity:
            self._forget(next(iter(self._kept.values())))

    def _fits(self, length: int) -> bool:
        return length * self._cache.token_bytes <= self._capacity

    def _forget(self, held: Held) -> None:
        del self._kept[id(held)]
        self._tree.remove(held.tokens, held)
        self.kept_bytes -= held.bytes
