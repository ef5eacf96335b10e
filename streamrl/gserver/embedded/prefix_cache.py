"""The prefix cache: reuses computed keys and values for siblings, later turns and resumed responses.

It records which tokens' keys and values are in the slots of running requests, and keeps those of finished ones outside
the slots, up to `capacity` bytes; the least recently used are dropped first. Invariant: only results of the present
weights are shared. After an update, earlier results serve only the requests that they belong to (the pause mode
`in_place`), and no later ones.

A compressed prefix tree (`PrefixTree`) finds the token sequence that shares the longest beginning with a new one. Its
invariant: every node but the root ends a sequence or has at least two children; so the tree has fewer than twice as
many nodes as sequences, and below every node there is a sequence.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from streamrl.gserver.embedded.model import SlotCache
from streamrl.records.logs import RateLimitedLog

log = logging.getLogger(__name__)

LEAST_TOKENS = 8
"""Least length, in tokens, of a kept sequence."""


class CachedTokens:
    """Keys and values of `tokens`: in a slot, or kept outside the slots."""

    __slots__ = ("kept", "slot", "tokens")

    def __init__(self, tokens: Sequence[int], *, slot: int = -1, kept: Sequence[Tensor] = ()) -> None:
        self.tokens = tokens
        self.slot = slot
        """The slot; -1: not in a slot."""
        self.kept = kept
        """For each layer, as `KVCache.take` returns them."""

    @property
    def bytes(self) -> int:
        """Memory of the copies kept outside the slots."""
        return sum(layer.numel() * layer.element_size() for layer in self.kept)


class PrefixCache:
    """All keys and values that can be shared; the slots of `KVCache` are filled from them."""

    def __init__(self, cache: SlotCache, *, capacity: int) -> None:
        """`capacity`: bytes kept of finished requests; 0 keeps nothing."""
        self.kept_bytes = 0
        self._cache = cache
        self._capacity = capacity
        self._warnings = RateLimitedLog(log)
        self._tree: PrefixTree[CachedTokens] = PrefixTree()
        self._slots: dict[int, CachedTokens] = {}
        self._kept: OrderedDict[int, CachedTokens] = OrderedDict()  # by id, least recently used first

    def clear(self) -> None:
        """Share no earlier results any more, and free the kept copies."""
        self._tree.clear()
        self._slots.clear()
        self._kept.clear()
        self.kept_bytes = 0

    def cached(self, tokens: Sequence[int], *, limit: int) -> int:
        """Return how many of the first `limit` tokens need not be computed."""
        return min(limit, self._tree.longest(tokens)[1])

    def fill(self, slot: int, tokens: Sequence[int], *, limit: int) -> int:
        """Copy the cached part of the first `limit` tokens into `slot`; return its length in tokens."""
        entry, length = self._tree.longest(tokens)
        length = min(limit, length)
        if entry is not None and length:
            if entry.slot < 0:
                self._cache.put(slot, entry.kept, length)
                self._kept.move_to_end(id(entry))
            elif entry.slot != slot:
                self._cache.copy(entry.slot, [slot], length)
        self.remove(slot)
        return length

    def place(self, slot: int, tokens: Sequence[int]) -> None:
        """Record that `slot` now has the keys and values of `tokens`, computed by the present weights."""
        self.remove(slot)
        self._slots[slot] = entry = CachedTokens(list(tokens), slot=slot)
        self._tree.insert(entry.tokens, entry)

    def move(self, source: int, target: int) -> None:
        """Record that the contents of slot `source` were copied to slot `target`."""
        self.remove(target)
        entry = self._slots.pop(source, None)
        if entry is not None:
            entry.slot = target
            self._slots[target] = entry

    def remove(self, slot: int) -> None:
        """Stop sharing the contents of `slot`, which are about to change."""
        entry = self._slots.pop(slot, None)
        if entry is not None:
            self._tree.remove(entry.tokens, entry)

    def finish(self, slot: int, tokens: Sequence[int]) -> None:
        """Keep `tokens` of the request in `slot`, which ends, unless earlier weights computed some of them."""
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
        try:
            taken = self._cache.take(slot, len(tokens))
        except RuntimeError as error:  # no memory is left: only requests that would share the copy are affected
            self._warnings.warning("a finished response is not kept in the prefix cache: %s", error)
            return
        entry = CachedTokens(list(tokens), kept=taken)
        self._kept[id(entry)] = entry
        self._tree.insert(entry.tokens, entry)
        self.kept_bytes += entry.bytes
        while self.kept_bytes > self._capacity:
            self._forget(next(iter(self._kept.values())))

    def _fits(self, length: int) -> bool:
        return length * self._cache.token_bytes <= self._capacity

    def _forget(self, entry: CachedTokens) -> None:
        del self._kept[id(entry)]
        self._tree.remove(entry.tokens, entry)
        self.kept_bytes -= entry.bytes


Value = TypeVar("Value")


class _Node(Generic[Value]):
    """A node of the tree: its `tokens`, at least one, follow its parent's; the sequences of `values` end after them."""

    __slots__ = ("children", "tokens", "values")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.values: list[Value] = []
        self.children: dict[int, _Node[Value]] = {}


class PrefixTree(Generic[Value]):
    """Sequences of tokens, each with a value; several may be equal. A search takes time in proportion to its match."""

    def __init__(self) -> None:
        self._root: _Node[Value] = _Node(())

    def insert(self, tokens: Sequence[int], value: Value) -> None:
        """Add `value` for `tokens`."""
        node, start = self._root, 0
        while start < len(tokens):
            child = node.children.get(tokens[start])
            if child is None:
                child = node.children[tokens[start]] = _Node(list(tokens[start:]))
            else:
                common = common_length(child.tokens, tokens, start=start)
                if common < len(child.tokens):
                    child = _split(node, child, common)
            start += len(child.tokens)
            node = child
        node.values.append(value)

    def remove(self, tokens: Sequence[int], value: Value) -> None:
        """Remove a value that was inserted for `tokens`; raises `KeyError` if it was not."""
        path = [self._root]
        start = 0
        while start < len(tokens):
            child = path[-1].children.get(tokens[start])
            if child is None or common_length(child.tokens, tokens, start=start) < len(child.tokens):
                raise KeyError(f"no such sequence of {len(tokens)} tokens is in the tree")
            start += len(child.tokens)
            path.append(child)
        if value not in path[-1].values:
            raise KeyError(f"{value} is not in the tree for this sequence of {len(tokens)} tokens")
        path[-1].values.remove(value)
        if len(path) > 1:
            _tidy(path)

    def longest(self, tokens: Sequence[int]) -> tuple[Value | None, int]:
        """Return a value whose sequence has the longest common beginning with `tokens`, and its length; or (None,
        0)."""
        node, start = self._root, 0
        while start < len(tokens):
            child = node.children.get(tokens[start])
            if child is None:
                break
            common = common_length(child.tokens, tokens, start=start)
            start += common
            node = child
            if common < len(child.tokens):
                break
        return (_any_below(node), start) if start else (None, 0)

    def along(self, tokens: Sequence[int]) -> list[Value]:
        """Return the values of all sequences that are prefixes of `tokens`, shortest first."""
        node, start, found = self._root, 0, list(self._root.values)
        while start < len(tokens):
            child = node.children.get(tokens[start])
            if child is None or common_length(child.tokens, tokens, start=start) < len(child.tokens):
                break
            start += len(child.tokens)
            node = child
            found += node.values
        return found

    def clear(self) -> None:
        """Remove all sequences."""
        self._root = _Node(())


def common_length(edge: Sequence[int], tokens: Sequence[int], *, start: int = 0) -> int:
    """Return how many leading elements `edge` has in common with `tokens` from `start` on.

    Uses bisection, since slices compare fast.
    """
    low, high = 0, max(0, min(len(edge), len(tokens) - start))
    if edge[:high] == tokens[start : start + high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if edge[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _split(parent: _Node[Value], child: _Node[Value], length: int) -> _Node[Value]:
    """Put a node between the two, after the first `length` tokens of `child`."""
    between: _Node[Value] = _Node(child.tokens[:length])
    child.tokens = child.tokens[length:]
    between.children[child.tokens[0]] = child
    parent.children[between.tokens[0]] = between
    return between


def _tidy(path: Sequence[_Node[Value]]) -> None:
    """Remove the last node of `path` if it is not needed, and join a node that is left with only one child."""
    parent, node = path[-2], path[-1]
    if node.values:
        return
    if not node.children:
        del parent.children[node.tokens[0]]
        if len(path) > 2:
            _join(path[-3], parent)
    else:
        _join(parent, node)


def _join(parent: _Node[Value], node: _Node[Value]) -> None:
    if node.values or len(node.children) != 1:
        return
    [child] = node.children.values()
    child.tokens = [*node.tokens, *child.tokens]
    parent.children[child.tokens[0]] = child


def _any_below(node: _Node[Value]) -> Value:
    while not node.values:
        node = next(iter(node.children.values()))
    return node.values[-1]
