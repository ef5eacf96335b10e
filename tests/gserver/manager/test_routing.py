"""The routing policy: pure, by properties, and a simulation of unequal gservers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.gserver.manager.gserver import AHEAD, Gserver, GserverLoad, Route, Work
from streamrl.gserver.manager.registry import MemberEvent
from streamrl.gserver.manager.routing import Fleet, LeastLoadedHeap
from streamrl.transport.generation import ServerInfo


def fleet_of(count: int, *, capacity: int = 0, tokens: int = 0) -> Fleet:
    fleet = Fleet()
    for index in range(count):
        gserver = Gserver(index, f"http://g{index}")
        fleet.join(gserver)
        gserver.info = ServerInfo(max_running_requests=capacity or None, max_total_num_tokens=tokens or None)
        gserver.handle(MemberEvent.FOUND_CURRENT)
    return fleet


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 0.0, 1.0, 2.5])), max_size=300))
def test_the_least_loaded_is_found_among_all_costs(changes: list[tuple[int, float | None]]) -> None:
    found: LeastLoadedHeap[str] = LeastLoadedHeap()
    costs: dict[int, float] = {}
    for key, cost in changes:
        if cost is None:
            costs.pop(key, None)
            found.remove(key)
        else:
            costs[key] = cost
            found.put(key, cost, f"item {key}")
        ordered = sorted((cost, key) for key, cost in costs.items())
        assert found.first() == (f"item {ordered[0][1]}" if ordered else None)
        others = [key for _, key in ordered if key != 0]
        assert found.first(excluding=0) == (f"item {others[0]}" if others else None)
        assert len(found) == len(costs)


@given(speeds=st.lists(st.integers(1, 20), min_size=1, max_size=6), groups=st.integers(0, 120))
def test_work_is_shared_in_proportion_to_speed(speeds: list[int], groups: int) -> None:
    fleet = fleet_of(len(speeds))
    for gserver, speed in zip(fleet.all(), speeds, strict=True):
        learn_speed(fleet, gserver, float(speed))
    for _ in range(groups):
        fleet.assign(Work(1, 100), now=0.0)
    loads = [g.load.routed.requests for g in fleet.all()]
    assert sum(loads) == groups
    for mine, speed in zip(loads, speeds, strict=True):
        for other, others_speed in zip(loads, speeds, strict=True):
            assert mine / speed <= (other + 1) / others_speed + 1e-9


def learn_speed(fleet: Fleet, gserver: Gserver, speed: float) -> None:
    for second in (0.0, 1.0):
        stats = {"tokens_generated_total": speed * second, "busy_seconds_total": second, "slot_seconds_total": second}
        fleet.measured(gserver, stats, now=second)


class FleetMachine(RuleBasedStateMachine):
    """Groups come, change and go while gservers fill up, drain, fall silent and are measured."""

    CAPACITY = 12

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet = fleet_of(3, capacity=self.CAPACITY, tokens=4000)
        self.gservers = {gserver.index: gserver for gserver in self.fleet.all()}
        self.known = self.fleet.all()
        self.work: dict[Route, Work] = {}

    @rule(requests=st.integers(1, 6), tokens=st.integers(0, 600))
    def assign(self, requests: int, tokens: int) -> None:
        open_before = {g.index for g in self.fleet.all() if g.serving and not g.load.full}
        route = self.fleet.assign(Work(requests, tokens), now=self.now)
        assert (route is not None) == bool(open_before)
        if route is not None:
            assert route.gserver.index in open_before
            assert route.work.requests == requests
            self.work[route] = route.work

    @precondition(lambda self: self.work)
    @rule(data=st.data(), requests=st.integers(0, 6), tokens=st.integers(0, 600))
    def change(self, data: st.DataObject, requests: int, tokens: int) -> None:
        route = data.draw(st.sampled_from(list(self.work)))
        self.work[route] = Work(requests, tokens)
        self.fleet.change(route, self.work[route], now=self.now)

    @precondition(lambda self: self.work)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        route = data.draw(st.sampled_from(list(self.work)))
        del self.work[route]
        self.fleet.release(route)

    @precondition(lambda self: self.work)
    @rule(data=st.data(), avoid=st.integers(-1, 2))
    def reassign(self, data: st.DataObject, avoid: int) -> None:
        route = data.draw(st.sampled_from(list(self.work)))
        before = route.gserver
        choice = self.fleet.reassign(route, now=self.now, avoid=f"http://g{avoid}")
        if before.serving and before.index != avoid:
            assert choice is before, "where its cache is"
        elif choice is not None:
            assert choice.index != avoid
            assert choice.serving
            assert route.gserver is choice
            work, had = route.work, self.work[route]
            assert work == had or (not had.tokens and work.requests == had.requests)
            self.work[route] = work
        else:
            assert route.gserver is before

    @rule(index=st.integers(0, 2), running=st.integers(0, 20), seconds=st.sampled_from([0.1, 1.0]))
    def heartbeat(self, index: int, running: int, seconds: float) -> None:
        self.now += seconds
        if self.gservers[index].takes_part:
            self.fleet.measured(self.gservers[index], {"running": running, "queued": 0.0}, now=self.now)

    @rule(index=st.integers(0, 2), event=st.sampled_from(MemberEvent))
    def happen(self, index: int, event: MemberEvent) -> None:
        self.gservers[index].handle(event)

    @rule(index=st.integers(0, 2))
    def replace(self, index: int) -> None:
        """Another process takes the place and begins to serve; what was routed to the one before stays there."""
        self.gservers[index].handle(MemberEvent.REMOVED)
        gserver = Gserver(index, f"http://g{index}")
        gserver.info = ServerInfo(max_running_requests=self.CAPACITY, max_total_num_tokens=4000)
        self.fleet.join(gserver)
        gserver.handle(MemberEvent.FOUND_CURRENT)
        self.gservers[index] = gserver
        self.known.append(gserver)

    @invariant()
    def every_group_is_counted_once(self) -> None:
        assert {route: route.work for g in self.known for route in g.routes} == self.work
        for gserver in self.known:
            assert all(route.gserver is gserver for route in gserver.routes)
            works = [route.work for route in gserver.routes]
            requests, tokens = (sum(figures) for figures in zip((0, 0), *works, strict=True))
            assert gserver.load.routed == Work(requests, tokens)
            assert 0 <= gserver.load.requests <= requests

    @invariant()
    def capacity_is_known_of_exactly_while_there_is_some(self) -> None:
        assert self.fleet.has_capacity == any(g.serving and not g.load.full for g in self.fleet.all())
        assert self.fleet.serving() == [g for g in self.fleet.all() if g.serving]


FleetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFleet = FleetMachine.TestCase


@given(st.integers(1, 40), st.integers(1, 8))
def test_no_gserver_takes_much_more_than_it_runs(capacity: int, group: int) -> None:
    fleet = fleet_of(2, capacity=capacity)
    routes = []
    while (route := fleet.assign(Work(group, 0), now=0.0)) is not None:
        routes.append(route)
    for gserver in fleet.all():
        assert gserver.load.routed.requests >= capacity
        assert gserver.load.routed.requests < capacity * (1 + AHEAD) + group
    assert routes[0].gserver is fleet.all()[0]
    fleet.change(routes[0], Work(0, 0), now=0.0)
    assert fleet.has_capacity == (fleet.all()[0].load.routed.requests < capacity * (1 + AHEAD))


def test_capacity_that_becomes_free_is_told() -> None:
    told: list[int] = []
    fleet = Fleet(on_capacity=lambda: told.append(1))
    gserver = Gserver(0, "http://g0")
    fleet.join(gserver)
    gserver.info = ServerInfo(max_running_requests=1)
    assert told == []
    gserver.handle(MemberEvent.FOUND_CURRENT)
    assert len(told) == 1
    route = fleet.assign(Work(2, 0), now=0.0)
    assert route is not None
    fleet.change(route, Work(1, 0), now=0.0)
    assert len(told) == 2
    gserver.handle(MemberEvent.DRAINED)
    fleet.release(route)
    assert len(told) == 2


def test_a_heartbeat_corrects_the_count_but_not_by_what_it_cannot_have_seen() -> None:
    load = GserverLoad()
    load.change(Work(0, 0), Work(8, 0), now=0.0)
    load.change(Work(0, 0), Work(4, 0), now=10.0)
    assert load.requests == 12
    load.measure({"running": 5.0, "queued": 0.0}, now=10.1)
    assert load.requests == 9, "5 run, and 4 may still be on their way"
    load.measure({"running": 7.0, "queued": 1.0}, now=12.0)
    assert load.requests == 8
    load.change(Work(0, 0), Work(2, 0), now=12.1)
    assert load.requests == 10
    load.measure({"running": 99.0}, now=20.0)
    assert load.requests == 14, "no more than is routed there"


def test_speed_is_that_at_high_concurrency() -> None:
    load = GserverLoad()

    def beat(tokens: float, busy: float, slots: float) -> None:
        totals = load._totals or (0.0, 0.0, 0.0)
        names = ("tokens_generated_total", "busy_seconds_total", "slot_seconds_total")
        values = (totals[0] + tokens, totals[1] + busy, totals[2] + slots)
        load.measure(dict(zip(names, values, strict=True)), now=0.0)

    beat(0.0, 1.0, 8.0)
    beat(800.0, 1.0, 8.0)
    assert load.speed == 800.0
    beat(100.0, 1.0, 1.0)
    assert load.speed == 800.0, "slow because it had little to do"
    beat(0.0, 0.0, 0.0)
    assert load.speed == 800.0, "it did nothing, for example because it was paused"
    beat(400.0, 1.0, 8.0)
    assert 400.0 < load.speed < 800.0, "slow with much to do"
