"""Admission: groups start where there is room and a gserver that serves, and every prompt's fate is accounted for."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.gserver.manager.admission import MAX_DEATHS, Admissions
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.registry import MemberEvent, MemberState
from streamrl.gserver.manager.routing import Fleet
from streamrl.ledger import Ledger
from streamrl.types import SampleMeta
from tests.groups import make_group

SERVING = MemberState.SERVING
HAPPENED: dict[MemberState, list[MemberEvent]] = {
    MemberState.UNCHECKED: [],
    MemberState.SERVING: [MemberEvent.FOUND_CURRENT],
    MemberState.EVICTED: [MemberEvent.FOUND_OUTDATED],
    MemberState.SILENT: [MemberEvent.FELL_SILENT],
}
"""How a gserver that has joined comes into each state."""


def fleet_of(*states: MemberState) -> Fleet:
    fleet = Fleet()
    for index, state in enumerate(states):
        gserver = Gserver(index, f"http://g{index}")
        fleet.join(gserver)
        for event in HAPPENED[state]:
            gserver.handle(event)
        assert gserver.state is state
    return fleet


def test_an_update_reaches_all_that_are_heard_of_but_not_who_failed_it_before() -> None:
    fleet = fleet_of(SERVING, MemberState.EVICTED, MemberState.UNCHECKED, MemberState.SILENT)
    assert [g.index for g in fleet.candidates(5)] == [0, 1, 2]
    fleet.all()[1].failed_version = 5
    assert [g.index for g in fleet.candidates(5)] == [0, 2]
    assert [g.index for g in fleet.candidates(6)] == [0, 1, 2]
    for gserver in fleet.all():
        gserver.failed_version = 5
    assert [g.index for g in fleet.candidates(5)] == [0, 1, 2]
    fleet.all()[0].handle(MemberEvent.UNREACHABLE)
    assert [g.index for g in fleet.candidates(5)] == [1, 2]
    for gserver in fleet.all():
        gserver.handle(MemberEvent.UNREACHABLE)
    assert [g.index for g in fleet.candidates(5)] == [0, 1, 2]


FINAL = (MemberEvent.REMOVED, MemberEvent.GAVE_UP, MemberEvent.DRAINED)
"""They take a gserver out of the fleet, at once or later."""


def accept(ledger: Ledger, seq: int) -> None:
    assert ledger.accept(SampleMeta.of(make_group(seq), head=0)) is not None


class AdmissionsMachine(RuleBasedStateMachine):
    """Workers take, lose, reject and finish groups while gservers come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger(groups_per_batch=3, max_staleness=1, lease_seconds=10.0)
        self.fleet = fleet_of(SERVING, SERVING)
        self.admissions = Admissions(ledger=self.ledger, fleet=self.fleet, group_size=4)
        self.deaths: dict[int, list[int]] = {}
        self.all_deaths = 0
        self.last_with: dict[int, str] = {}

    @property
    def leased(self) -> dict[int, str]:
        ledger = self.ledger
        return {seq: holder for seq in range(ledger.next_seq) if (holder := ledger.holder(seq)) is not None}

    @rule(worker=st.integers(0, 2), count=st.integers(1, 9), ticket=st.sampled_from(["", "a", "b"]))
    def take(self, worker: int, count: int, ticket: str) -> None:
        name = f"rollout/{worker}"
        before = self.admissions.given(name, ticket)
        room = self.ledger.room
        taken = self.admissions.take(name, count, workers=3, ticket=ticket, now=self.now)
        if before is not None:
            assert taken == before
        else:
            assert len(taken) <= min(room, count)
            self.last_with |= {admission.seq: name for admission in taken}
            assert bool(taken) == (room > 0 and bool(self.fleet.serving()))

    @rule(worker=st.integers(0, 2))
    def replace(self, worker: int) -> None:
        had = [seq for seq, holder in self.last_with.items() if holder == f"rollout/{worker}"]
        self.admissions.worker_replaced(f"rollout/{worker}")
        self.all_deaths += bool(had)
        for seq in had:
            del self.last_with[seq]
            self.deaths.setdefault(seq, []).append(self.all_deaths)
            count, since = len(self.deaths[seq]), self.all_deaths - self.deaths[seq][0] + 1
            assert (seq in self.ledger.rejected) == (count >= MAX_DEATHS and 2 * count > since)

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        rejected = set(self.ledger.rejected)
        self.admissions.expire(now=self.now)
        assert set(self.ledger.rejected) == rejected, "silence is no prompt's fault"

    @precondition(lambda self: self.ledger.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.leased)))
        accept(self.ledger, seq)
        if data.draw(st.booleans()):
            self.ledger.discarding(seq)
            self.ledger.discarded(seq)
        self.deaths.pop(seq, None)
        self.last_with.pop(seq, None)
        assert self.ledger.holder(seq) is None

    @precondition(lambda self: self.ledger.running)
    @rule(data=st.data(), worker=st.integers(0, 2))
    def reject(self, data: st.DataObject, worker: int) -> None:
        seq, holder = data.draw(st.sampled_from(sorted(self.leased.items())))
        self.admissions.reject(f"rollout/{worker}", seq, "filtered")
        assert (seq in self.ledger.rejected) == (holder == f"rollout/{worker}")
        if seq in self.ledger.rejected:
            del self.last_with[seq]

    @precondition(lambda self: self.ledger.running)
    @rule(data=st.data())
    def reroute(self, data: st.DataObject) -> None:
        seq, holder = data.draw(st.sampled_from(sorted(self.leased.items())))
        choice = self.admissions.reroute(holder, seq, avoid="http://g0", now=self.now)
        assert choice is None or (choice.address != "http://g0" and self.ledger.groups[seq].route in choice.routes)

    @rule()
    def advance(self) -> None:
        self.ledger.advance(self.ledger.policy_version + 1)

    @rule(index=st.integers(0, 1), event=st.sampled_from([e for e in MemberEvent if e not in FINAL]))
    def happen(self, index: int, event: MemberEvent) -> None:
        self.fleet.all()[index].handle(event)

    @invariant()
    def a_group_is_on_one_gserver_while_its_lease_lasts(self) -> None:
        routes = {seq: group.route for seq, group in self.ledger.groups.items() if group.route is not None}
        assert sorted(routes) == sorted(self.leased)
        assert {id(route) for g in self.fleet.all() for route in g.routes} == {id(route) for route in routes.values()}
        assert all(route in route.gserver.routes for route in routes.values())

    @invariant()
    def the_record_tells_with_whom_a_group_was_last_and_at_which_deaths(self) -> None:
        out = {seq: group for seq, group in self.ledger.groups.items() if group.state != "accepted"}
        assert {seq: group.worker for seq, group in out.items() if group.worker} == self.last_with
        deaths = {seq: numbers for seq, numbers in self.deaths.items() if seq in out}
        assert {seq: group.deaths for seq, group in out.items() if group.deaths} == deaths


AdmissionsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAdmissions = AdmissionsMachine.TestCase


def lone_worker() -> tuple[Ledger, Admissions]:
    ledger = Ledger(groups_per_batch=1, max_staleness=1, lease_seconds=10.0)
    return ledger, Admissions(ledger=ledger, fleet=fleet_of(SERVING), group_size=1)


def test_a_long_response_on_workers_that_come_and_go_is_not_taken_for_their_killer() -> None:
    """It is at three of the many ends of workers; one that is at all of them is given up."""
    ledger, admissions = lone_worker()
    for end in range(4):
        (long,) = admissions.take("rollout/0", 1, workers=1, ticket=f"long {end}", now=0.0)
        for other in range(3):
            (short,) = admissions.take("rollout/1", 1, workers=1, ticket=f"{end} {other}", now=0.0)
            admissions.worker_replaced("rollout/1")
            accept(ledger, short.seq)
            ledger.advance(ledger.policy_version + 1)
        admissions.worker_replaced("rollout/0")
    assert long.seq not in ledger.rejected


def test_prompts_that_training_waits_for_start_again_together_when_the_run_was_slowed_meanwhile() -> None:
    ledger = Ledger(groups_per_batch=2, max_staleness=1, lease_seconds=10.0, in_order=True)
    admissions = Admissions(ledger=ledger, fleet=fleet_of(SERVING), group_size=1)
    assert len(admissions.take("rollout/0", 9, workers=1, ticket="a", now=0.0)) == 4
    for seq in (2, 3):
        accept(ledger, seq)
    ledger.admitted_staleness = 0
    admissions.worker_replaced("rollout/0")
    again = admissions.take("rollout/0", 9, workers=1, ticket="b", now=0.0)
    assert [admission.seq for admission in again] == [0, 1]
    assert admissions.given("rollout/0", "b") == again
    assert ledger.room == 0
