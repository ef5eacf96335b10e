"""The life of a member: its state machine under any order of events, and as docs/manager.md draws it."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streamrl.gserver.manager.gserver import Gserver, serves
from streamrl.gserver.manager.members import ASKED_TO_LEAVE
from streamrl.gserver.manager.registry import (
    SILENT_STATES,
    TRANSITIONS,
    Member,
    MemberEvent,
    MemberState,
    next_state,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "manager.md"


def test_weights_are_known_by_their_label() -> None:
    assert serves("default", "0")
    assert serves("0", "0")
    assert serves("7", "7")
    assert not serves("default", "1")
    assert not serves("6", "7")


@given(st.sampled_from(MemberState), st.lists(st.sampled_from(MemberEvent)))
def test_every_event_in_every_state(state: MemberState, events: list[MemberEvent]) -> None:
    for event in events:
        before, state = state, next_state(state, event)
        assert next_state(state, event) is state, "an event that is reported twice counts once"
        if before is MemberState.GONE:
            assert state is MemberState.GONE
        if before in SILENT_STATES and state is not before:
            assert event in (MemberEvent.RETURNED, MemberEvent.GAVE_UP, MemberEvent.REMOVED)
        if before is MemberState.GAVE_UP:
            assert state in (MemberState.GAVE_UP, MemberState.GONE)
        if before in ASKED_TO_LEAVE and state is not before:
            assert state in (*ASKED_TO_LEAVE, *SILENT_STATES, MemberState.GONE), "there is no way back"
        if state is MemberState.SERVING and before is not state:
            assert event in (MemberEvent.FOUND_CURRENT, MemberEvent.UPDATED), "only with the current weights"
            assert before in (MemberState.UNCHECKED, MemberState.SUSPECT, MemberState.EVICTED)
        if state is MemberState.DRAINING and before is not state:
            assert before is MemberState.SERVING, "it has the current weights"
        match event:
            case MemberEvent.REMOVED:
                assert state is MemberState.GONE
            case MemberEvent.FELL_SILENT | MemberEvent.GAVE_UP:
                assert state in (*SILENT_STATES, MemberState.GONE)
            case MemberEvent.RETURNED:
                assert state not in SILENT_STATES or state is MemberState.GAVE_UP
            case MemberEvent.DRAINED:
                assert state in (*ASKED_TO_LEAVE, *SILENT_STATES, MemberState.GONE)
            case MemberEvent.EMPTIED:
                assert state not in (MemberState.DRAINING, MemberState.HANDING_OVER)
            case MemberEvent.UPDATE_FAILED | MemberEvent.PASSED_OVER | MemberEvent.UNREACHABLE:
                assert state not in (MemberState.SERVING, MemberState.DRAINING)


def test_every_event_has_its_transitions_and_every_state_is_reached() -> None:
    assert set(TRANSITIONS) == set(MemberEvent)
    assert reached_from(MemberState.UNCHECKED, set(MemberEvent), serves_weights=True) == set(MemberState)


def test_other_processes_have_some_of_the_states_of_a_gserver() -> None:
    """The events are those that the manager reports of a process that is no gserver."""
    events = {
        *(MemberEvent.FELL_SILENT, MemberEvent.RETURNED, MemberEvent.GAVE_UP),
        *(MemberEvent.DRAINED, MemberEvent.EMPTIED, MemberEvent.REMOVED),
    }
    of_weights = {MemberState.UNCHECKED, MemberState.SUSPECT, MemberState.EVICTED, MemberState.HANDING_OVER}
    assert reached_from(MemberState.SERVING, events, serves_weights=False) == set(MemberState) - of_weights
    worker = Member("rollout", 0)
    worker.handle(MemberEvent.FELL_SILENT)
    worker.handle(MemberEvent.RETURNED)
    assert worker.state is MemberState.SERVING, "without a check of its weights"


def reached_from(state: MemberState, events: set[MemberEvent], *, serves_weights: bool) -> set[MemberState]:
    reached: set[MemberState] = set()
    ahead = {state}
    while ahead:
        reached |= ahead
        follows = {next_state(b, event, serves_weights=serves_weights) for b in ahead for event in events}
        ahead = follows - reached
    return reached


class Life(RuleBasedStateMachine):
    """The record of one gserver: its properties follow from its events."""

    def __init__(self) -> None:
        super().__init__()
        self.gserver = Gserver(0, "http://g0")
        self.changes: list[MemberState] = []
        self.gserver.on_change = lambda gserver: self.changes.append(gserver.state)
        self.failures_in_a_row = 0

    @rule(event=st.sampled_from(MemberEvent))
    def happen(self, event: MemberEvent) -> None:
        gserver, before, changes = self.gserver, self.gserver.state, len(self.changes)
        gserver.handle(event)
        assert gserver.state is next_state(before, event)
        assert len(self.changes) - changes == (gserver.state is not before), "on_change is called once for a change"
        if event is MemberEvent.RETURNED and before is MemberState.SILENT:
            assert not gserver.serving, "it is checked first"
        if event is MemberEvent.RESYNC_FAILED:
            self.failures_in_a_row += 1
        if gserver.state is not before and (gserver.serving or event is MemberEvent.RETURNED):
            self.failures_in_a_row = 0
        assert gserver.failed_resyncs == self.failures_in_a_row

    @invariant()
    def groups_are_given_only_to_one_that_takes_part(self) -> None:
        gserver = self.gserver
        assert gserver.serving == (gserver.state is MemberState.SERVING)
        assert not (gserver.serving and (gserver.silent or gserver.lacks_weights or not gserver.takes_part))
        assert not (gserver.gone and gserver.takes_part)


TestLife = Life.TestCase


def drawn() -> set[tuple[str, str, str]]:
    """Event, state before and state after, of each transition in the document's table."""
    every = {state.value for state in MemberState} - {MemberState.GONE.value}
    section = DOCUMENT.read_text().split("<!-- states of a member -->")[1].split("<!-- end of states -->")[0]
    found = set()
    for event, before, after in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]:
        states = every - {after} if before == "any" else before.split(" or ")
        found |= {(event, state, after) for state in states}
    return found


def test_the_document_draws_what_the_code_does() -> None:
    code = {
        (event.value, before.value, after.value)
        for event, moves in TRANSITIONS.items()
        for before, after in moves.items()
    }
    assert drawn() == code
