"""The states of a weight update: whatever happens in whatever order, nothing serves a mixture, all are resumed."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.gserver.updates.states import (
    Action,
    MemberHealth,
    MemberPlan,
    Phase,
    Serves,
    UpdateStates,
    UpdateStep,
    Way,
    culprits,
    plan_for,
)

MOST_EVENTS = 500
WAYS: list[Way] = ["broadcast", "snapshot", "adapter"]

plans = st.builds(
    plan_for,
    way=st.sampled_from(WAYS),
    staged=st.booleans(),
    joined=st.booleans(),
    verified=st.booleans(),
    cut=st.booleans(),
)
Outcome = Literal["taken", "refused", "answer lost", "silent"]
OUTCOMES: list[Outcome] = [*["taken"] * 6, "refused", "answer lost", "silent"]
ANSWERS = 8
"""How often a call is answered for each other event: else few updates would come to their swap."""


class Pretended:
    """A gserver as the protocol sees it: weights `old`, `new` or `mixed`, and a stage beside them."""

    def __init__(self, plan: MemberPlan) -> None:
        self.plan = plan
        self.weights = "old"
        self.label: Serves = "old"
        self.staged = False
        self.paused = False
        self.let_go = False
        """Whoever asked it to pause leaves, and does not wait for what is under way: to be resumed may come first. An
        engine that stages pauses itself for a swap; what another one samples is not called that of a version."""
        self.requests_ended = False
        self.dead = False
        self.served_mixed = False

    def take(self, step: UpdateStep) -> None:
        match step:
            case UpdateStep.MARK:
                self.label = "other"
            case UpdateStep.RECEIVE if self.plan.mixes:
                self.write()
            case UpdateStep.RECEIVE:
                self.staged = True
            case UpdateStep.PAUSE:
                self.paused, self.requests_ended = True, False
            case UpdateStep.SWAP:
                assert self.paused or self.let_go or self.plan.apply == (UpdateStep.SWAP,)
                assert self.weights == "new" if self.plan.mixes else self.staged
                self.weights, self.label = "new", "new"
            case UpdateStep.RESUME:
                self.served_mixed |= self.weights == "mixed" and not self.requests_ended
                self.paused = False

    def fail(self, step: UpdateStep) -> None:
        """The step broke off on the way."""
        if self.plan.mixes and step in (UpdateStep.RECEIVE, UpdateStep.SWAP):
            self.write()
            self.weights = "mixed"

    def write(self) -> None:
        """Over the weights that it serves."""
        assert self.paused or self.let_go
        assert self.label == "other", "what it samples from now on would pass for that of a version"
        self.weights = "new"


@settings(max_examples=500, deadline=None)
@given(st.data(), st.lists(plans, min_size=1, max_size=4))
def test_events_in_any_order(data: st.DataObject, chosen: list[MemberPlan]) -> None:
    gservers = {who: Pretended(plan) for who, plan in enumerate(chosen)}
    states: UpdateStates[int] = UpdateStates(dict(enumerate(chosen)))
    waiting: list[Action[int]] = []
    answered: set[Action[int]] = set()
    resumed_last: dict[int, bool] = {}
    committed = left = False

    def hand_out(steps: list[Action[int]]) -> None:
        for do in steps:
            assert not states.ended
            assert do in states.outstanding
            assert not (do.step in (UpdateStep.VERIFY, UpdateStep.SWAP) and not committed)
            if do.step in (UpdateStep.PAUSE, UpdateStep.RESUME):
                resumed_last[do.who] = do.step is UpdateStep.RESUME
                gservers[do.who].let_go |= left
            gservers[do.who].requests_ended |= do.step is UpdateStep.CLEAR
            waiting.append(do)

    hand_out(states.start())
    for _ in range(MOST_EVENTS):
        if states.ended:
            break
        possible = [*(do for do in waiting if do not in answered)]
        moves = ["answer"] * ANSWERS * bool(possible) + ["overdue"] * bool(states.awaits)
        moves += ["commit", "abort"] * (not committed and not states.ended) + ["leave"]
        match data.draw(st.sampled_from(moves)):
            case "commit":
                committed = True
                hand_out(states.commit())
            case "abort":
                hand_out(states.abort("no"))
            case "overdue":
                hand_out(states.overdue("late"))
            case "leave" if data.draw(st.integers(0, 9)) == 0:
                left = True
                hand_out(states.leave("bye"))
            case "answer":
                do = data.draw(st.sampled_from(possible))
                answered.add(do)
                gserver = gservers[do.who]
                outcome = data.draw(st.sampled_from(OUTCOMES))
                gserver.dead |= outcome == "silent"
                if gserver.dead:
                    gserver.fail(do.step)
                    hand_out(states.failed(do, MemberHealth.LOST, f"{do.who} is gone"))
                elif do.step is UpdateStep.ASK and outcome == "taken":
                    hand_out(states.serves(do, gserver.label))
                elif outcome == "refused":
                    gserver.fail(do.step)
                    hand_out(states.failed(do, MemberHealth.REFUSED, f"{do.who} says no"))
                else:
                    gserver.take(do.step)
                    lost = outcome == "answer lost"
                    hand_out(states.failed(do, MemberHealth.SLOW, "late") if lost else states.succeeded(do))
    else:
        # nobody answers any more: only deadlines pass
        for _ in range(MOST_EVENTS):
            if states.ended:
                break
            for do in states.outstanding:
                hand_out(states.failed(do, MemberHealth.SLOW, "late"))
            if states.awaits:
                hand_out(states.overdue("late"))

    assert states.ended
    assert states.phase is Phase.ENDED
    assert states.outstanding == []
    assert states.state == ("done" if states.done else "rolled_back")
    assert all(resumed_last.values()), "whoever was asked to pause was asked to resume"
    assert states.done == bool(states.swapped)
    assert states.done or states.reason
    stands = "new" if states.done else "old"
    for who, gserver in gservers.items():
        assert not gserver.served_mixed, "requests of mixed weights were ended before they could go on"
        if who not in states.evicted:
            assert gserver.weights != "mixed"
            assert gserver.label != "other"
            assert gserver.weights == stands or left  # who leaves does not ask whether a swap took place
        if who in states.swapped:
            assert gserver.weights == "new"
            assert who not in states.evicted


def drive(states: UpdateStates[str], steps: list[Action[str]]) -> list[UpdateStep]:
    """Let every step succeed."""
    taken = []
    while steps:
        do = steps.pop(0)
        taken.append(do.step)
        steps += states.succeeded(do)
    return taken


def test_adapters_come_without_a_pause_unless_requests_are_to_end() -> None:
    for cut in (False, True):
        states = UpdateStates({"a": plan_for(way="adapter", staged=False, joined=False, verified=True, cut=cut)})
        assert drive(states, states.start()) == [UpdateStep.RECEIVE]
        after = drive(states, states.commit())
        pause, resume = ([UpdateStep.PAUSE], [UpdateStep.RESUME]) if cut else ([], [])
        assert after == [UpdateStep.VERIFY, *pause, UpdateStep.SWAP, *resume]
        assert states.done


@pytest.mark.parametrize("way", ["broadcast", "snapshot"])
@pytest.mark.parametrize("staged", [True, False])
def test_nobody_is_paused_before_the_commit_unless_it_must(way: Way, staged: bool) -> None:
    states = UpdateStates({"a": plan_for(way=way, staged=staged, joined=False, verified=True)})
    before = drive(states, states.start())
    assert states.awaits == "commit"
    assert states.state == "waiting_commit"
    assert (UpdateStep.PAUSE in before) == (way == "broadcast" and not staged)
    after = drive(states, states.commit())
    assert after[-2:] == [UpdateStep.SWAP, UpdateStep.RESUME]
    assert after.index(UpdateStep.VERIFY) < after.index(UpdateStep.SWAP)
    assert states.done
    assert states.state == "done"


# --- who is to blame ---

FINE, LATE, REFUSED, LOST = MemberHealth.FINE, MemberHealth.SLOW, MemberHealth.REFUSED, MemberHealth.LOST

seen_by_index = st.dictionaries(st.integers(0, 5), st.sampled_from(MemberHealth), min_size=1)


@given(seen=seen_by_index, publisher_failed=st.booleans())
def test_everyone_lost_is_blamed_nobody_fine_is_and_someone_who_answers_is_always_left(
    seen: dict[int, MemberHealth], publisher_failed: bool
) -> None:
    blamed = culprits(seen, publisher_failed=publisher_failed)
    assert {who for who, what in seen.items() if what is LOST} <= blamed
    assert not any(seen[who] is FINE for who in blamed)
    assert any(what is not LOST for what in seen.values()) <= (len(blamed) < len(seen))


def test_a_failure_that_follows_from_a_loss_is_forgiven() -> None:
    assert culprits({0: REFUSED, 1: LOST, 2: LATE}, publisher_failed=False) == {1}
    assert culprits({0: REFUSED, 1: FINE}, publisher_failed=False) == {0}
    assert culprits({0: REFUSED, 1: FINE}, publisher_failed=True) == set()
    assert culprits({0: LATE, 1: FINE}, publisher_failed=False) == {0}
    assert culprits({0: LATE, 1: LATE}, publisher_failed=False) == set()
