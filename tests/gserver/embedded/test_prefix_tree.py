"""The prefix tree finds what a search through all sequences finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.gserver.embedded.prefix_cache import PrefixTree, common_length

tokens = st.lists(st.integers(0, 2), max_size=12)


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(tokens, tokens, st.integers(0, 5))
def test_common_length(a: list[int], b: list[int], start: int) -> None:
    assert common_length(a, b, start=start) == shared(a, b[start:])


@given(st.lists(st.tuples(tokens, st.booleans())), tokens)
def test_the_tree_agrees_with_a_search_through_all(steps: list[tuple[list[int], bool]], wanted: list[int]) -> None:
    tree: PrefixTree[int] = PrefixTree()
    there: dict[int, list[int]] = {}
    for number, (sequence, removes) in enumerate(steps):
        if removes and there:
            oldest = next(iter(there))
            tree.remove(there.pop(oldest), oldest)
        else:
            tree.insert(sequence, number)
            there[number] = sequence
        value, length = tree.longest(wanted)
        assert length == max((shared(held, wanted) for held in there.values()), default=0)
        assert value is None if length == 0 else shared(there[value or 0], wanted) == length
        beginnings = {number for number, held in there.items() if wanted[: len(held)] == held}
        along = tree.along(wanted)
        assert set(along) == beginnings
        assert [len(there[number]) for number in along] == sorted(len(there[number]) for number in along)
        check_shape(tree)


def check_shape(tree: PrefixTree[int]) -> None:
    nodes = [tree._root]
    for node in nodes:
        for first, child in node.children.items():
            assert child.tokens[0] == first
            assert child.values or len(child.children) > 1
            nodes.append(child)


def test_removing_what_is_not_there_is_an_error() -> None:
    tree: PrefixTree[str] = PrefixTree()
    tree.insert([1, 2, 3], "a")
    for sequence, value in (([1, 2], "a"), ([1, 2, 3], "b"), ([1, 2, 3, 4], "a"), ([2], "a")):
        with pytest.raises(KeyError, match="tree"):
            tree.remove(sequence, value)
    assert tree.longest([1, 2, 9]) == ("a", 2)
    tree.clear()
    assert tree.longest([1, 2, 9]) == (None, 0)
