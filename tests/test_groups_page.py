"""docs/groups.md names the states of a group that the code has, and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from streamrl.ledger import GroupState

PAGE = (Path(__file__).parents[1] / "docs" / "groups.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Cells of each row of the table that begins with `header`, from the top of the page."""
    lines = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named(cell: str) -> list[str]:
    return re.findall(r"`([a-z]+)`", cell)


def test_the_page_lists_the_states_of_the_code() -> None:
    assert [named(row[0]) for row in rows("| state |")] == [[state] for state in get_args(GroupState)]


def test_the_page_says_who_moves_a_group_into_and_out_of_states_that_exist() -> None:
    states = set(get_args(GroupState))
    moves = rows("| from |")
    assert {state for row in moves for state in named(row[1])} == states - {"new"}, "nothing becomes new"
    for came_from, _, _, _, where in moves:
        assert set(named(came_from)) <= states
        for name in re.findall(r"`(\w+\.\w+)`", where):
            if name.endswith(".py"):
                assert list(Path(__file__).parents[1].glob(f"streamrl/{name}")), name


def test_the_diagram_draws_the_states_and_the_moves_of_the_tables() -> None:
    states = set(get_args(GroupState))
    drawn = set(re.findall(r"^ +([a-z]+) --> ([a-z]+):", PAGE, flags=re.MULTILINE))
    assert {state for move in drawn for state in move} == states
    listed = set()
    for came_from, to, *_ in rows("| from |"):
        starts = states - {"new", "returned"} if came_from == "any but `new`" else set(named(came_from))
        listed |= {(start, end) for start in starts for end in named(to)}
    assert drawn == listed
