"""The manager's pure parts: blame, routing, admissions, the registry."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.gserver.admissions import MAX_DEATHS, Admissions
from streamrl.gserver.blame import Seen, culprits
from streamrl.gserver.registry import Registry
from streamrl.gserver.routing import Fleet, Standing, serves
from streamrl.ledger import Ledger
from streamrl.transport.control.members import Register

FINE, LATE, REFUSED, LOST = Seen.FINE, Seen.LATE, Seen.REFUSED, Seen.LOST

seen_by_index = st.dictionaries(st.integers(0, 5), st.sampled_from(Seen), min_size=1)


@given(seen=seen_by_index, publisher_failed=st.booleans())
def test_nobody_fine_is_blamed_and_everyone_lost_is(seen: dict[int, Seen], publisher_failed: bool) -> None:
    blamed = culprits(seen, publisher_failed=publisher_failed)
    assert {who for who, what in seen.items() if what is LOST} <= blamed
    assert not any(seen[who] is FINE for who in blamed)


@given(seen=seen_by_index, publisher_failed=st.booleans())
def test_someone_who_answers_is_always_left(seen: dict[int, Seen], publisher_failed: bool) -> None:
    blamed = culprits(seen, publisher_failed=publisher_failed)
    assert any(what is not LOST for what in seen.values()) <= (len(blamed) < len(seen))


def test_a_failure_that_follows_from_a_loss_is_forgiven() -> None:
    assert culprits({0: REFUSED, 1: LOST, 2: LATE}, publisher_failed=False) == {1}
    assert culprits({0: REFUSED, 1: FINE}, publisher_failed=False) == {0}
    assert culprits({0: REFUSED, 1: FINE}, publisher_failed=True) == set()
    assert culprits({0: LATE, 1: FINE}, publisher_failed=False) == {0}
    assert culprits({0: LATE, 1: LATE}, publisher_failed=False) == set()


def test_weights_are_known_by_their_label() -> None:
    assert serves("default", 0)
    assert serves("0", 0)
    assert serves("7", 7)
    assert not serves("default", 1)
    assert not serves("6", 7)


def fleet_of(*standings: Standing) -> Fleet:
    fleet = Fleet()
    for index, standing in enumerate(standings):
        fleet.join(index, f"http://g{index}").standing = standing
    return fleet


@given(st.lists(st.sampled_from(Standing), max_size=5), st.integers(0, 40))
def test_load_is_even_and_only_on_those_that_serve(standings: list[Standing], groups: int) -> None:
    fleet = fleet_of(*standings)
    for seq in range(groups):
        fleet.assign(seq, now=0.0)
    loads = [len(g.groups) for g in fleet.serving()]
    assert sum(loads) == (groups if loads else 0)
    assert not loads or max(loads) - min(loads) <= 1
    assert not any(g.groups for g in fleet.all() if g.standing is not Standing.SERVING)


def test_an_update_reaches_all_that_are_heard_of_but_not_who_failed_it_before() -> None:
    fleet = fleet_of(Standing.SERVING, Standing.EVICTED, Standing.UNCHECKED, Standing.SILENT)
    assert [g.index for g in fleet.candidates(5)] == [0, 1, 2]
    fleet.all()[1].failed_version = 5
    assert [g.index for g in fleet.candidates(5)] == [0, 2]
    assert [g.index for g in fleet.candidates(6)] == [0, 1, 2]
    for gserver in fleet.all():
        gserver.failed_version = 5
    assert [g.index for g in fleet.candidates(5)] == [0, 1, 2]


def registration(role: Any, index: int, *, pid: int = 1) -> Register:
    return Register(role=role, index=index, address="", config_digest="", pid=pid, host="h")


def test_members_fall_silent_each_at_its_time() -> None:
    registry = Registry(patience={"gserver": 2.0, "rollout": 2.0, "model_worker": 2.0, "master": 60.0})
    worker, _ = registry.register(registration("rollout", 0), now=0.0)
    registry.register(registration("master", 0), now=0.0)
    assert registry.next_silence() == 2.0
    assert not registry.hear(worker, now=1.0)
    assert registry.silence(now=2.9) == []
    assert registry.silence(now=3.0) == [worker]
    assert registry.silence(now=4.0) == []
    assert registry.next_silence() == 60.0
    assert registry.hear(worker, now=5.0)
    assert registry.next_silence() == 7.0


def test_only_another_process_takes_a_place() -> None:
    registry = Registry(patience={"gserver": 2.0, "rollout": 2.0, "model_worker": 2.0, "master": 60.0})
    first, fresh = registry.register(registration("rollout", 0), now=0.0)
    assert fresh
    assert registry.register(registration("rollout", 0), now=1.0) == (first, False)
    second, fresh = registry.register(registration("rollout", 0, pid=2), now=2.0)
    assert fresh
    assert registry.of("rollout") == [second]


class AdmissionsMachine(RuleBasedStateMachine):
    """Workers take, lose, reject and finish groups while gservers come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger(groups_per_batch=3, max_staleness=1, lease_seconds=10.0)
        self.fleet = fleet_of(Standing.SERVING, Standing.SERVING)
        self.admissions = Admissions(ledger=self.ledger, fleet=self.fleet, group_size=4)
        self.deaths: dict[int, int] = {}

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
            assert bool(taken) == (room > 0 and bool(self.fleet.serving()))

    @rule(worker=st.integers(0, 2))
    def replace(self, worker: int) -> None:
        lost = [lease.seq for lease in self.ledger.leases() if lease.worker == f"rollout/{worker}"]
        self.admissions.worker_replaced(f"rollout/{worker}")
        self.count_deaths(lost)

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        lost = [lease.seq for lease in self.ledger.leases() if lease.expires <= self.now]
        self.admissions.expire(now=self.now)
        self.count_deaths(lost)

    def count_deaths(self, lost: list[int]) -> None:
        for seq in lost:
            self.deaths[seq] = self.deaths.get(seq, 0) + 1
            assert (seq in self.ledger.rejected) == (self.deaths[seq] == MAX_DEATHS)

    @precondition(lambda self: self.ledger.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([lease.seq for lease in self.ledger.leases()]))
        drop = data.draw(st.booleans())
        self.admissions.settle([seq], [seq] if drop else [])
        self.deaths.pop(seq, None)
        assert self.ledger.holder(seq) is None

    @precondition(lambda self: self.ledger.running)
    @rule(data=st.data(), worker=st.integers(0, 2))
    def reject(self, data: st.DataObject, worker: int) -> None:
        lease = data.draw(st.sampled_from(self.ledger.leases()))
        self.admissions.reject(f"rollout/{worker}", lease.seq, "filtered")
        assert (lease.seq in self.ledger.rejected) == (lease.worker == f"rollout/{worker}")

    @precondition(lambda self: self.ledger.running)
    @rule(data=st.data())
    def reroute(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.ledger.leases()))
        choice = self.admissions.reroute(lease.worker, lease.seq, avoid="http://g0", now=self.now)
        assert choice is None or (choice.address != "http://g0" and lease.seq in choice.groups)

    @rule()
    def advance(self) -> None:
        self.ledger.advance(self.ledger.policy_version + 1)

    @rule(index=st.integers(0, 1), standing=st.sampled_from(Standing))
    def change_standing(self, index: int, standing: Standing) -> None:
        self.fleet.all()[index].standing = standing

    @invariant()
    def a_group_is_on_one_gserver_while_its_lease_lasts(self) -> None:
        placed = sorted(seq for g in self.fleet.all() for seq in g.groups)
        assert placed == [lease.seq for lease in self.ledger.leases()]


AdmissionsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAdmissions = AdmissionsMachine.TestCase
