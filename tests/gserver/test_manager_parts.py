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
from streamrl.ledger import Fate, Ledger
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


def registration(role: Any, index: int, *, pid: int = 1, address: str = "") -> Register:
    return Register(role=role, index=index, address=address, config_digest="", pid=pid, host="h")


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


def test_what_silent_gservers_and_those_that_were_replaced_were_asked_for_is_told_to_go_elsewhere() -> None:
    registry = Registry(patience={"gserver": 2.0, "rollout": 2.0, "model_worker": 2.0, "master": 60.0})
    first, _ = registry.register(registration("gserver", 0, address="http://a"), now=0.0)
    registry.register(registration("rollout", 0), now=0.0)
    assert (registry.unanswering(now=1.0), registry.changes_of_silence) == ([], 0)
    registry.silence(now=2.0)
    assert (registry.unanswering(now=2.0), registry.changes_of_silence) == (["http://a"], 2)
    registry.hear(first, now=3.0)
    assert (registry.unanswering(now=3.0), registry.changes_of_silence) == ([], 3)
    registry.register(registration("gserver", 0, pid=2, address="http://b"), now=4.0)
    assert registry.unanswering(now=7.9) == ["http://a"], "the process before it may hang, and nobody else can tell"
    assert registry.unanswering(now=8.0) == []
    registry.register(registration("gserver", 0, pid=3, address="http://b"), now=9.0)
    assert registry.unanswering(now=9.0) == [], "the new process answers at this address"


def test_one_that_gave_up_stays_silent_whatever_it_says() -> None:
    registry = Registry(patience={"gserver": 2.0, "rollout": 2.0, "model_worker": 2.0, "master": 60.0})
    gserver, _ = registry.register(registration("gserver", 0, address="http://a"), now=0.0)
    registry.gave_up(gserver)
    assert not registry.hear(gserver, now=1.0)
    assert (registry.silent(), registry.live("gserver")) == ([gserver], 0)
    registry.register(registration("gserver", 0, pid=2, address="http://b"), now=2.0)
    assert (registry.silent(), registry.live("gserver")) == ([], 1)


def test_nobody_is_silent_because_the_manager_stood_still() -> None:
    registry = Registry(patience={"gserver": 2.0, "rollout": 2.0, "model_worker": 2.0, "master": 60.0})
    registry.register(registration("gserver", 0), now=0.0)
    registry.excuse(100.0)
    assert registry.silence(now=101.0) == []
    assert registry.next_silence() == 102.0


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
        assert self.ledger.rejected == rejected, "silence is no prompt's fault"

    @precondition(lambda self: self.ledger.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.leased)))
        changes = self.ledger.changes(seq) + data.draw(st.integers(1, 2))
        self.admissions.settle([Fate(seq, changes)])
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
        assert choice is None or (choice.address != "http://g0" and seq in choice.groups)

    @rule()
    def advance(self) -> None:
        self.ledger.advance(self.ledger.policy_version + 1)

    @rule(index=st.integers(0, 1), standing=st.sampled_from(Standing))
    def change_standing(self, index: int, standing: Standing) -> None:
        self.fleet.all()[index].standing = standing

    @invariant()
    def a_group_is_on_one_gserver_while_its_lease_lasts(self) -> None:
        placed = sorted(seq for g in self.fleet.all() for seq in g.groups)
        assert placed == sorted(self.leased)


AdmissionsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAdmissions = AdmissionsMachine.TestCase


def lone_worker() -> tuple[Ledger, Admissions]:
    ledger = Ledger(groups_per_batch=1, max_staleness=1, lease_seconds=10.0)
    return ledger, Admissions(ledger=ledger, fleet=fleet_of(Standing.SERVING), group_size=1)


def test_partitions_discard_no_prompt() -> None:
    ledger, admissions = lone_worker()
    for outage in range(20):
        assert admissions.take("rollout/0", 2, workers=1, ticket=str(outage), now=20.0 * outage)
        assert admissions.expire(now=20.0 * outage + 15)
    assert (ledger.rejected, admissions.given_up) == (set(), 0)


def test_a_long_response_on_workers_that_come_and_go_is_not_taken_for_their_killer() -> None:
    """It is at three of the many ends of workers; one that is at all of them is given up."""
    ledger, admissions = lone_worker()
    for end in range(4):
        (long,) = admissions.take("rollout/0", 1, workers=1, ticket=f"long {end}", now=0.0)
        for other in range(3):
            (short,) = admissions.take("rollout/1", 1, workers=1, ticket=f"{end} {other}", now=0.0)
            admissions.worker_replaced("rollout/1")
            ledger.settle(Fate(short.seq, 1))
            admissions.settle([Fate(short.seq, 1)])
            ledger.advance(ledger.policy_version + 1)
        admissions.worker_replaced("rollout/0")
    assert long.seq not in ledger.rejected


def test_a_killer_is_given_up_also_if_its_lease_ran_out_before_its_worker_was_replaced() -> None:
    ledger, admissions = lone_worker()
    for death in range(MAX_DEATHS):
        admissions.take("rollout/0", 1, workers=1, ticket=str(death), now=100.0 * death)
        admissions.expire(now=100.0 * death + 50)
        admissions.worker_replaced("rollout/0")
    assert (ledger.rejected, admissions.given_up) == ({0}, 1)
