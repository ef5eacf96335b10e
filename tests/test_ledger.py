"""The ledger's rules over random schedules: workers that crash, fall silent and come late, and a
trainer that selects, drops and steps, under all three `over_age` policies.

The model here follows the real protocol: workers are admitted and reject; heads store each group once, and the buffer
hears of it late; leases live from heartbeat to heartbeat.
"""

from __future__ import annotations

from collections import Counter
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.ledger import Ledger, OverAge, ReadyGroups, count_over_age, next_in_order, select_batch
from streamrl.records.lineage import Lineage
from streamrl.trainer.graph import Graph
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.types import SampleMeta
from tests.groups import make_meta

LEASE = 10.0
WORKERS = ["rollout/0", "rollout/1", "rollout/2"]
workers = st.sampled_from(WORKERS)


def meta(seq: int, versions: list[int]) -> SampleMeta:
    """A group of one sibling with one token for each of `versions`."""
    return make_meta(seq, [len(versions)], versions=Counter(versions))


class Run(RuleBasedStateMachine):
    """A ledger between workers and a trainer."""

    @initialize(
        batch=st.integers(1, 3),
        staleness=st.integers(0, 3),
        over_age=st.sampled_from(["mask", "wait", "drop"]),
        faults=st.booleans(),
    )
    def open(self, batch: int, staleness: int, over_age: OverAge, faults: bool) -> None:
        self.batch, self.staleness, self.over_age, self.faults = batch, staleness, over_age, faults
        self.admitted_staleness = staleness
        self.ledger = Ledger(
            groups_per_batch=batch, max_staleness=staleness, lease_seconds=LEASE, in_order=over_age == "wait"
        )
        self.now = 0.0
        self.lost: set[str] = set()
        # what the ledger ought to know
        self.leased: dict[int, str] = {}
        self.expires: dict[int, float] = {}
        self.returned: set[int] = set()
        self.accepted: set[int] = set()
        self.rejected: set[int] = set()
        self.rejected_at: dict[int, int] = {}  # policy version
        # the workers: versions of the tokens so far
        self.generating: dict[tuple[str, int], list[int]] = {}
        # the trainer
        self.known: set[int] = set()  # to the heads: pushed again, they are duplicates
        self.arrivals: list[SampleMeta] = []  # stored, and not heard of by the master
        self.buffer = AsyncIOSequenceBuffer(Graph(()), self.ledger)
        self.held: dict[int, SampleMeta] = {}  # what the buffer ought to hold
        self.trained: list[int] = []
        self.changed = 0  # how often the ledger called its observers
        self.ledger.observers.append(self.count_change)
        self.ended: list[int] = []  # leases, as the ledger reported
        self.ends: list[int] = []  # leases that ought to have ended
        self.ledger.on_lease_end = lambda group: self.ended.append(group.seq)

    def count_change(self) -> None:
        self.changed += 1

    @property
    def bound(self) -> int:
        return (self.ledger.policy_version + self.admitted_staleness + 1) * self.batch

    @property
    def gate(self) -> int:
        """How many new groups may start."""
        return max(0, self.bound - len(self.accepted) - len(self.leased))

    @property
    def room(self) -> int:
        """How many groups may start: in order also those of the next batch that came back, when nothing runs and none
        may start anew."""
        if self.over_age == "wait" and not self.gate and not self.leased:
            return len(self.returned.intersection(self.ledger.next_in_order(self.batch)))
        return self.gate

    @rule(staleness=st.integers(0, 3))
    def slow(self, staleness: int) -> None:
        """The run is slowed, or less so: what runs goes on, and teardown sees that it never gets stuck."""
        self.admitted_staleness = self.ledger.admitted_staleness = min(staleness, self.staleness)

    # --- workers ---------------------------------------------------------------------------------

    @rule(worker=workers, count=st.integers(1, 5))
    def admit(self, worker: str, count: int) -> None:
        if worker in self.lost:
            return
        room, gate, fresh = self.room, self.gate, self.ledger.next_seq
        assert self.ledger.room == room
        again = sorted(self.returned)[: min(count, room)]
        admitted = [group.seq for group in self.ledger.admit(worker, count, now=self.now)]
        assert admitted == [*again, *range(fresh, fresh + min(count, gate) - len(again))]
        for seq in admitted:
            self.returned.discard(seq)
            self.leased[seq] = worker
            self.expires[seq] = self.now + LEASE
            self.generating[worker, seq] = []
        if len(admitted) > len(again):
            assert self.ledger.accepted + self.ledger.running <= self.bound

    @precondition(lambda self: self.generating)
    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        """Some groups get a token, sampled under the version of the moment."""
        for key in data.draw(st.sets(st.sampled_from(sorted(self.generating)), min_size=1)):
            self.generating[key].append(self.ledger.policy_version)

    @rule(data=st.data(), steps=st.integers(1, 4))
    def carry_on(self, data: st.DataObject, steps: int) -> None:
        """A few good training steps, while some groups take long."""
        stragglers = data.draw(st.sets(st.sampled_from(sorted(self.generating)))) if self.generating else set()
        for _ in range(steps):
            for worker in WORKERS:
                self.admit(worker, 3)
            for key in sorted(self.generating):
                self.generating[key].append(self.ledger.policy_version)
                if key not in stragglers:
                    self.push(*key)
            self.agree()
            self.train()

    @precondition(lambda self: any(self.generating.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """A group is done, and pushed, though its lease may have run out long ago."""
        key = data.draw(st.sampled_from(sorted(key for key, tokens in self.generating.items() if tokens)))
        self.push(*key)

    def push(self, worker: str, seq: int) -> None:
        tokens = self.generating.pop((worker, seq))
        if seq not in self.known:
            self.known.add(seq)
            self.arrivals.append(meta(seq, tokens))

    @precondition(lambda self: self.generating)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        worker, seq = data.draw(st.sampled_from(sorted(self.generating)))
        del self.generating[worker, seq]
        if self.ledger.holder(seq) in (worker, None):  # the manager sees to that
            gate = self.gate
            took_place, changed = seq in self.leased, self.changed
            effective = self.ledger.reject(seq)
            assert effective is (took_place or seq in self.returned)
            assert not self.ledger.reject(seq), "a second time changes nothing"
            if effective:
                take_out(self, seq)
                self.rejected.add(seq)
                self.rejected_at[seq] = self.ledger.policy_version
                assert self.changed > changed, "whoever waits for the place is not woken"
                assert self.ledger.room == self.room
                assert self.gate >= gate, "a rejection gives the place back"

    @precondition(lambda self: self.faults)
    @rule(worker=workers)
    def crash(self, worker: str) -> None:
        """The worker is gone; its leases remain until they run out."""
        self.lost.add(worker)
        for key in [key for key in self.generating if key[0] == worker]:
            del self.generating[key]

    @precondition(lambda self: self.faults)
    @rule(worker=workers)
    def replace(self, worker: str) -> None:
        """Another process takes the worker's name: what the old one had goes back at once."""
        self.crash(worker)
        self.lost.discard(worker)
        theirs = sorted(seq for seq, holder in self.leased.items() if holder == worker)
        assert [group.seq for group in self.ledger.release(worker)] == theirs
        for seq in theirs:
            take_out(self, seq)
            self.returned.add(seq)

    @rule(worker=workers)
    def beat(self, worker: str) -> None:
        if worker in self.lost:
            return
        self.ledger.renew(worker, now=self.now)
        for seq, holder in self.leased.items():
            if holder == worker:
                self.expires[seq] = self.now + LEASE

    @precondition(lambda self: self.faults)
    @rule(seconds=st.floats(0.5, 12))
    def time_passes(self, seconds: float) -> None:
        """Who did not beat loses its leases, but may still be at work."""
        self.now += seconds
        due = sorted(seq for seq, expires in self.expires.items() if expires <= self.now)
        assert [group.seq for group in self.ledger.expire(now=self.now)] == due
        for seq in due:
            take_out(self, seq)
            self.returned.add(seq)

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """The trainer's processes die, or the controller does: workers keep groups of the earlier policies."""
        version = data.draw(st.integers(0, self.ledger.policy_version))
        if data.draw(st.booleans()):  # a controller that has died leaves nothing but the checkpoint
            self.ledger.next_seq = 0
        in_hand = {key for key, tokens in self.generating.items() if max(tokens, default=0) <= version}
        self.trained = self.trained[: version * self.batch]
        self.rejected = {seq for seq, at in self.rejected_at.items() if at <= version and seq in self.rejected}
        self.ends.extend(self.leased)
        self.ledger.restore(Lineage(1, version), trained=self.trained, rejected=self.rejected)
        self.known, self.accepted = set(self.trained), set(self.trained)
        self.arrivals.clear()
        self.held.clear()
        self.leased.clear()
        self.expires.clear()
        self.returned = {seq for seq in range(self.ledger.next_seq) if seq not in self.accepted | self.rejected}
        self.buffer = AsyncIOSequenceBuffer(Graph(()), self.ledger)
        for worker in data.draw(st.permutations(WORKERS)):
            self.keep(worker, {seq for holder, seq in in_hand if holder == worker})
        for key in [key for key in self.generating if self.leased.get(key[1]) != key[0]]:
            del self.generating[key]

    def keep(self, worker: str, in_hand: set[int]) -> None:
        """The worker keeps the groups in hand that it would be admitted now if it were alone."""
        closed_or_held = {*self.accepted, *self.rejected, *self.leased}
        open_seqs = (seq for seq in count() if seq not in closed_or_held)
        expected = in_hand.intersection(islice(open_seqs, self.room))
        kept = [group.seq for group in self.ledger.keep(worker, in_hand, now=self.now)]
        assert kept == sorted(expected)
        assert self.ledger.keep(worker, kept, now=self.now) == [self.ledger.groups[seq] for seq in kept], "asked again"
        for seq in kept:
            self.leased[seq] = worker
            self.expires[seq] = self.now + LEASE
        self.returned.update(seq for seq in range(self.ledger.next_seq) if seq not in closed_or_held)
        self.returned.difference_update(kept)
        assert self.ledger.kept == len(self.leased)
        if self.over_age != "wait":
            assert not kept or self.ledger.accepted + self.ledger.running <= self.bound

    # --- trainer ---------------------------------------------------------------------------------

    @rule()
    def take_in(self) -> None:
        """The master hears which groups came; those that were given up by then are unwanted."""
        wanted = [arrived for arrived in self.arrivals if arrived.seq not in self.rejected]
        for arrived in wanted:
            take_out(self, arrived.seq)
            self.accepted.add(arrived.seq)
            self.held[arrived.seq] = arrived
        refused = self.buffer.put_batch(self.arrivals)
        assert [*map(id, refused)] == [id(arrived) for arrived in self.arrivals if arrived not in wanted]
        self.arrivals.clear()

    def agree(self) -> None:
        """All that is under way arrives."""
        self.take_in()
        assert self.accepted == {*self.held, *self.trained}
        for seq, worker in self.leased.items():
            assert self.expires[seq] <= self.now or worker in self.lost or (worker, seq) in self.generating, (
                f"nobody makes seq {seq}, and its lease lives as long as its worker"
            )

    @rule(data=st.data())
    def train(self, data: st.DataObject | None = None) -> None:
        version = self.ledger.policy_version
        order = self.ledger.next_in_order(self.batch)
        closed = {*self.trained, *self.rejected}
        assert order == [seq for seq in range(len(closed) + self.batch) if seq not in closed][: self.batch]
        selection = select_batch(
            self.buffer.ready,
            policy_version=version,
            groups_per_batch=self.batch,
            max_staleness=self.staleness,
            over_age=self.over_age,
            next_in_order=order if self.over_age == "wait" else (),
        )
        over_age = {
            seq: count_over_age(held.version_counts, policy_version=version, max_staleness=self.staleness)
            for seq, held in self.held.items()
        }
        assert set(selection.drop) == ({s for s, n in over_age.items() if n} if self.over_age == "drop" else set())
        for seq in selection.drop:
            del self.held[seq]
        with self.buffer.dropping(selection.drop) as with_workers:
            assert with_workers == ({0: selection.drop} if selection.drop else {})
            self.known.difference_update(selection.drop)
            if data is not None and data.draw(st.booleans()):  # others had them as well, and bring them now
                for key in [key for key, tokens in self.generating.items() if tokens and key[1] in selection.drop]:
                    self.push(*key)
                self.take_in()
        for seq in selection.drop:
            if seq not in self.held:
                take_out(self, seq)
                self.returned.add(seq)
        assert len(selection.batch) == (0 if selection.short else self.batch)
        if not selection.batch:
            assert selection.short > 0
            return
        assert selection.batch == sorted(selection.batch)
        batch = [self.held.pop(seq) for seq in selection.batch]
        for seq, tokens in zip(selection.batch, batch, strict=True):
            young = {v: n for v, n in tokens.version_counts.items() if version - v <= self.staleness}
            assert sum(young.values()) == tokens.sampled_tokens - over_age[seq]
            if self.over_age in ("drop", "wait"):
                assert over_age[seq] == 0, "every token of every group is young enough"
            if self.staleness == 0 and not self.faults:
                assert set(tokens.version_counts) == {version}, "on-policy"
            self.trained.append(seq)
        assert self.buffer.metas(selection.batch) == batch
        assert self.buffer.trained_on(selection.batch) == {0: selection.batch}
        if self.over_age == "wait":
            assert selection.batch == order
        changed = self.changed
        self.ledger.advance(version + 1)
        assert self.changed > changed, "whoever waits for room is not woken"

    # --- what always holds -----------------------------------------------------------------------

    @invariant()
    def each_seq_is_in_one_place(self) -> None:
        ledger = self.ledger
        holders = {seq: holder for seq in range(ledger.next_seq) if (holder := ledger.holder(seq)) is not None}
        assert holders == self.leased
        assert sorted(self.ended) == sorted(self.ends)
        assert ledger.next_expiry() == min(self.expires.values(), default=None)
        assert sorted(ledger.groups) == sorted([*self.leased, *self.returned, *self.accepted - {*self.trained}])
        assert (ledger.running, ledger.returned) == (len(self.leased), len(self.returned))
        assert ledger.accepted == len(self.accepted)
        assert set(ledger.rejected) == self.rejected
        places = [*self.leased, *self.returned, *self.accepted, *self.rejected]
        assert sorted(places) == list(range(ledger.next_seq)), "one is lost, or in two places"
        for state, seqs in (
            ("leased", self.leased),
            ("returned", self.returned),
            ("accepted", self.accepted - {*self.trained}),
            ("trained", self.trained),
            ("rejected", self.rejected),
            ("new", [ledger.next_seq, -1]),
        ):
            assert all(ledger.state(seq) == state for seq in seqs)

    @invariant()
    def each_seq_ends_once(self) -> None:
        assert len(self.trained) == len(set(self.trained)) == len(self.ledger.trained_seqs)
        assert self.buffer.consumed == len(self.trained) + len(self.rejected)
        assert len(self.buffer) == len(self.buffer.ready) == len(self.held)
        assert self.buffer.metas(self.held) == list(self.held.values())
        assert not self.rejected & {*self.trained, *self.held}
        assert len(self.trained) == self.ledger.policy_version * self.batch

    def teardown(self) -> None:
        """Whatever happened, ledger and trainer agree in the end, and healthy workers bring the run forward."""
        if not hasattr(self, "ledger"):
            return
        self.agree()
        goal = self.ledger.policy_version + self.staleness + 2
        for _ in range(20 * (self.staleness + 2)):
            if self.ledger.policy_version >= goal:
                return
            for worker in WORKERS:
                self.replace(worker)
                self.admit(worker, 100)
            for key in sorted(self.generating):
                self.generating[key].append(self.ledger.policy_version)
                self.push(*key)
            self.agree()
            self.train()
        pytest.fail(f"the run is stuck at version {self.ledger.policy_version}")


def take_out(run: Run, seq: int) -> None:
    if run.leased.pop(seq, None) is not None:
        run.ends.append(seq)
    run.expires.pop(seq, None)
    for places in (run.returned, run.accepted, run.rejected):
        places.discard(seq)


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_prompt_that_training_waits_for_starts_again_when_the_run_was_slowed_meanwhile() -> None:
    ledger = Ledger(groups_per_batch=1, max_staleness=1, lease_seconds=LEASE, in_order=True)
    ledger.admit("rollout/0", 2, now=0.0)
    assert ledger.accept(meta(1, [0]))
    ledger.admitted_staleness = 0
    ledger.release("rollout/0")
    assert ledger.room == 1
    assert [group.seq for group in ledger.admit("rollout/1", 5, now=0.0)] == [0], "and no new one"
    assert ledger.room == 0


def test_a_group_that_came_back_does_not_start_before_its_batch_is_the_next() -> None:
    ledger = Ledger(groups_per_batch=1, max_staleness=0, lease_seconds=LEASE, in_order=True)
    ledger.next_seq = 2
    ledger.restore(Lineage(1, 0), trained=[], rejected=[])
    assert [group.seq for group in ledger.admit("rollout/0", 5, now=0.0)] == [0]
    assert ledger.accept(meta(0, [0]))
    assert ledger.room == 0, "group 1 would be one version too old in the second batch"


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_run_that_continues_with_other_batches_admits_as_far_ahead_as_ever(batch: int) -> None:
    ledger = Ledger(groups_per_batch=batch, max_staleness=1, lease_seconds=LEASE)
    ledger.restore(Lineage(1, 3), trained=range(6), rejected=[])  # three batches of two groups
    assert ledger.room == 2 * batch
    ledger.advance(4)
    assert ledger.room == 3 * batch
    assert [group.seq for group in ledger.admit("rollout/0", 1, now=0.0)] == [6]


@given(
    trained=st.sets(st.integers(0, 30)),
    rejected=st.sets(st.integers(0, 30)),
    start=st.integers(0, 10),
    count=st.integers(0, 8),
)
def test_next_in_order_skips_what_is_closed(trained: set[int], rejected: set[int], start: int, count: int) -> None:
    found = next_in_order((trained | rejected).__contains__, start=start, count=count)
    assert len(found) == count
    if found:
        assert sorted({*found, *(s for s in trained | rejected if start <= s < found[-1])}) == list(
            range(start, found[-1] + 1)
        )
        assert not set(found) & (trained | rejected)


def test_mask_takes_the_oldest_admissions_and_drop_takes_none_too_old() -> None:
    ready = ReadyGroups({5: 4, 2: 1, 7: 4, 9: 3})
    arguments = {"policy_version": 4, "groups_per_batch": 2, "max_staleness": 2}
    assert select_batch(ready, over_age="mask", **arguments).batch == [2, 5]  # type: ignore[arg-type]
    selection = select_batch(ready, over_age="drop", **arguments)  # type: ignore[arg-type]
    assert (selection.batch, selection.drop) == ([5, 7], [2])


@given(batch=st.integers(1, 4), staleness=st.integers(1, 6), slowed=st.integers(0, 6))
def test_what_is_trained_on_gets_as_fresh_as_a_slowed_run_asks_for(batch: int, staleness: int, slowed: int) -> None:
    """As soon as what ran before is trained on, which are as many steps as it was admitted ahead."""
    slowed = min(slowed, staleness)
    ledger = Ledger(groups_per_batch=batch, max_staleness=staleness, lease_seconds=LEASE)
    admitted: list[int] = []  # the version at which each group was
    ages = []
    for version in range(3 * staleness + 3):
        if version == staleness + 1:
            ledger.admitted_staleness = slowed
        for group in ledger.admit("rollout/0", 1000, now=0.0):
            admitted.append(version)
            ledger.accept(meta(group.seq, [version]))
        mine, admitted = admitted[:batch], admitted[batch:]
        assert len(mine) == batch, "the run is stuck"
        ages.append({version - begun for begun in mine})
        ledger.advance(version + 1)
    assert ages[staleness : 2 * staleness + 1] == [{staleness}] * (staleness + 1)
    assert ages[2 * staleness + 1 :] == [{slowed}] * (staleness + 2)
