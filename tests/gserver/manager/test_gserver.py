"""The life of a gserver: its state machine under any order of events, and as docs/manager.md draws it."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streamrl.gserver.manager.gserver import TRANSITIONS, Gserver, GserverEvent, GserverState, next_state, serves

DOCUMENT = Path(__file__).parents[3] / "docs" / "manager.md"
SILENT = (GserverState.SILENT, GserverState.LEAVING_SILENT)


def test_weights_are_known_by_their_label() -> None:
    assert serves("default", "0")
    assert serves("0", "0")
    assert serves("7", "7")
    assert not serves("default", "1")
    assert not serves("6", "7")


@given(st.sampled_from(GserverState), st.lists(st.sampled_from(GserverEvent)))
def test_whatever_happens_in_whatever_state(state: GserverState, events: list[GserverEvent]) -> None:
    for event in events:
        before, state = state, next_state(state, event)
        assert next_state(state, event) is state, "said twice, it happened once"
        if before is GserverState.GONE:
            assert state is GserverState.GONE
        if before in SILENT and state is not before:
            assert event in (GserverEvent.RETURNED, GserverEvent.EMPTIED, GserverEvent.REMOVED)
        if state is GserverState.SERVING and before is not state:
            assert event in (GserverEvent.FOUND_CURRENT, GserverEvent.UPDATED), "only with the current weights"
            assert before in (GserverState.UNCHECKED, GserverState.EVICTED)
        match event:
            case GserverEvent.REMOVED:
                assert state is GserverState.GONE
            case GserverEvent.FELL_SILENT:
                assert state in (*SILENT, GserverState.GONE)
            case GserverEvent.RETURNED:
                assert state not in SILENT
            case GserverEvent.EMPTIED:
                assert state in (GserverState.LEAVING, GserverState.LEAVING_SILENT, GserverState.GONE)
            case GserverEvent.UPDATE_FAILED | GserverEvent.PASSED_OVER | GserverEvent.UNREACHABLE:
                assert state is not GserverState.SERVING


def test_every_event_has_its_transitions_and_every_state_is_reached() -> None:
    assert set(TRANSITIONS) == set(GserverEvent)
    reached = {GserverState.UNCHECKED}
    while more := {follows for moves in TRANSITIONS.values() for before, follows in moves.items() if before in reached}:
        if more <= reached:
            break
        reached |= more
    assert reached == set(GserverState)


class Life(RuleBasedStateMachine):
    """The record of one gserver: what it says of itself follows from what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.gserver = Gserver(0, "http://g0")
        self.told: list[tuple[GserverState, bool]] = []
        self.gserver.on_change = lambda gserver: self.told.append((gserver.state, gserver.draining))

    @rule(event=st.sampled_from(GserverEvent))
    def happen(self, event: GserverEvent) -> None:
        before, told = self.gserver.state, len(self.told)
        self.gserver.handle(event)
        assert self.gserver.state is next_state(before, event)
        assert len(self.told) - told == (self.gserver.state is not before), "heard of exactly when it changes"

    @rule()
    def fall_silent(self) -> None:
        self.gserver.fall_silent()
        assert self.gserver.silent or self.gserver.state is GserverState.GONE

    @rule()
    def return_from_silence(self) -> None:
        was_silent = self.gserver.silent
        self.gserver.return_from_silence()
        assert not self.gserver.silent
        assert not (was_silent and self.gserver.serving), "it is checked first"

    @rule()
    def drain(self) -> None:
        self.gserver.drain()
        assert self.told[-1] == (self.gserver.state, True)

    @invariant()
    def groups_are_given_to_whom_serves_and_stays(self) -> None:
        gserver = self.gserver
        assert gserver.takes_groups == (gserver.state is GserverState.SERVING and not gserver.draining)
        assert not (gserver.takes_groups and gserver.silent)


TestLife = Life.TestCase


def drawn() -> set[tuple[str, str, str]]:
    """Event, state before and state after, of each transition in the document's table."""
    section = DOCUMENT.read_text().split("<!-- states of a gserver -->")[1].split("<!-- end of states -->")[0]
    found = set()
    for event, before, after in re.findall(r"^\| (.+?) \| .+? \| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]:
        found |= {(event, state, after) for state in before.split(" or ")}
    return found


def test_the_document_draws_what_the_code_does() -> None:
    code = {
        (event.value, before.value, after.value)
        for event, moves in TRANSITIONS.items()
        for before, after in moves.items()
    }
    assert drawn() == code
