"""Which of many token sequences shares the longest beginning with a new one: a compressed prefix tree. Pure.

Invariant: every node but the root ends a sequence or has at least two children; so the tree has fewer than twice as
many nodes as sequences, and below every node there is a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


class _Node(Generic[Value]):
    """What follows its parent: `tokens`, at least one; `values` end right after them."""

    __slots__ = ("children", "tokens", "values")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.values: list[Value] = []
        self.children: dict[int, _Node[Value]] = {}


class PrefixTree(Generic[Value]):
    """Sequences of tokens, each with a value; several may be equal. A search costs the length of what is found."""

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
        """Take out what was inserted so; raises `KeyError` if it was not."""
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
        """A value whose sequence shares the most leading tokens with `tokens`, and how many; (None, 0) for none."""
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
        """Values of all sequences that `tokens` begins with, shortest first."""
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
        self._root = _Node(())


def common_length(edge: Sequence[int], tokens: Sequence[int], *, start: int = 0) -> int:
    """How many leading elements of `edge` are those of `tokens` from `start` on; by halving, slices compare fast."""
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
    """Remove the last node of `path` if nothing needs it, and join what then has one child only."""
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
