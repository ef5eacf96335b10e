"""What routing by load and speed brings on SIMULATED gservers that differ in speed.

    python benchmarks/bench_routing.py

The manager's own routing (`gserver/routing.py`) against round robin, and against the fewest groups in flight, in a
simulation of gservers and time: no model, no process, no network. A gserver decodes its requests together; a step
takes `base + marginal * requests`, so that its throughput grows with the number of requests and saturates. Groups
have 8 siblings with log-normal lengths. As many groups are in flight as the ledger admits; where every gserver has
as many as it runs, groups wait, under round robin as well, where they wait for the gserver whose turn it is.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

from common import Row, parser_of, report

from streamrl.gserver.manager.gserver import Gserver, Route, Work
from streamrl.gserver.manager.registry import MemberEvent
from streamrl.gserver.manager.routing import Fleet
from streamrl.transport.generation import ServerInfo

SIBLINGS = 8
MEAN_TOKENS = 200
SIGMA = 0.8
PROMPT = 50
CAPACITY = 64
SECONDS = 120.0
HEARTBEAT = 1.0
WARM_UP = 30.0


@dataclass
class Simulated:
    """A gserver: `slowness` 1 is a step of 10 ms for one request and of 20 ms for 64."""

    slowness: float
    decoded: float = 0.0
    """Tokens that a request which had run from the beginning would have."""
    running: list[tuple[float, int, int]] = field(default_factory=list)
    """(`decoded` at its end, group, sibling), a heap."""
    queue: deque[tuple[int, int, float]] = field(default_factory=deque)
    """(group, sibling, length in tokens)"""
    totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    @property
    def step(self) -> float:
        return self.slowness * (0.010 + 0.010 * len(self.running) / CAPACITY)

    def fill(self) -> None:
        while self.queue and len(self.running) < CAPACITY:
            group, sibling, length = self.queue.popleft()
            heapq.heappush(self.running, (self.decoded + length, group, sibling))

    def advance(self, seconds: float) -> list[int]:
        """Decode for `seconds`, in which no sibling finishes before the end; return whose siblings have finished."""
        if not self.running:
            return []
        tokens = seconds / self.step
        self.totals[0] += tokens * len(self.running)
        self.totals[1] += seconds
        self.totals[2] += seconds * len(self.running)
        self.decoded += tokens
        done = []
        while self.running and self.running[0][0] < self.decoded + 1e-6:
            done.append(heapq.heappop(self.running)[1])
        return done

    def until_next(self) -> float:
        return (self.running[0][0] - self.decoded) * self.step if self.running else float("inf")


Policy = Callable[[Fleet, float], Route | None]


def by_the_manager(fleet: Fleet, now: float) -> Route | None:
    return fleet.assign(Work(SIBLINGS, 0), now=now)


def fewest_groups(fleet: Fleet, now: float) -> Route | None:
    choice = min(fleet.all(), key=lambda g: (len(g.routes), g.index))
    return place(fleet, choice, now)


def round_robin() -> Policy:
    turn = itertools.count()
    upcoming = [next(turn)]

    def choose(fleet: Fleet, now: float) -> Route | None:
        gservers = fleet.all()
        found = place(fleet, gservers[upcoming[0] % len(gservers)], now)
        if found is not None:
            upcoming[0] = next(turn)
        return found

    return choose


def place(fleet: Fleet, gserver: Gserver, now: float) -> Route | None:
    """Route to `gserver` if it has a place, with the fleet's own accounts."""
    if gserver.load.full:
        return None
    return fleet.assign_to(gserver, Work(SIBLINGS, 0), now=now)


def simulate(slowness: list[float], groups: int, policy: Policy, *, seed: int = 0) -> Row:
    """Tokens per second, mean group time in seconds, and the share of requests that waited in a gserver's queue."""
    draw = random.Random(seed)
    fleet = Fleet()
    servers = []
    for index, factor in enumerate(slowness):
        gserver = Gserver(index, f"simulated-{index}")
        gserver.info = ServerInfo(max_running_requests=CAPACITY)
        gserver.handle(MemberEvent.FOUND_CURRENT)
        fleet.join(gserver)
        servers.append(Simulated(factor))
    now, next_beat, seq = 0.0, HEARTBEAT, 0
    open_siblings: dict[int, int] = {}
    routes: dict[int, Route] = {}
    began: dict[int, float] = {}
    times: list[float] = []
    tokens_at_warm_up = 0.0
    warm = False
    while now < SECONDS:
        while len(open_siblings) < groups and (route := policy(fleet, now)) is not None:
            for sibling in range(SIBLINGS):
                length = max(1.0, draw.lognormvariate(0.0, SIGMA) * MEAN_TOKENS)
                servers[route.gserver.index].queue.append((seq, sibling, length))
            open_siblings[seq], began[seq], routes[seq] = SIBLINGS, now, route
            seq += 1
        for server in servers:
            server.fill()
        seconds = max(1e-9, min(next_beat - now, *(server.until_next() for server in servers)))
        now += seconds
        for server in servers:
            for group in server.advance(seconds):
                open_siblings[group] -= 1
                fleet.change(routes[group], Work(open_siblings[group], PROMPT * open_siblings[group]), now=now)
                if not open_siblings[group]:
                    fleet.release(routes.pop(group))
                    del open_siblings[group]
                    times.append(now - began.pop(group))
        if now >= next_beat - 1e-9:
            next_beat += HEARTBEAT
            names = ("tokens_generated_total", "busy_seconds_total", "slot_seconds_total")
            for gserver, server in zip(fleet.all(), servers, strict=True):
                stats = dict(zip(names, server.totals, strict=True))
                stats |= {"running": float(len(server.running)), "queued": float(len(server.queue))}
                fleet.measured(gserver, stats, now=now)
        if not warm and now >= WARM_UP:
            warm, tokens_at_warm_up, times = True, sum(server.totals[0] for server in servers), []
    tokens = sum(server.totals[0] for server in servers) - tokens_at_warm_up
    return {
        "tokens_per_second": round(tokens / (now - WARM_UP)),
        "mean_group_seconds": round(sum(times) / len(times), 2),
        "busy_shares": [round(server.totals[1] / now, 2) for server in servers],
    }


CASES: dict[str, list[float]] = {
    "8 equal": [1.0] * 8,
    "4 of them half as fast": [1.0] * 4 + [2.0] * 4,
    "2 of them a quarter as fast": [1.0] * 6 + [4.0] * 2,
    "1 of them a tenth as fast": [1.0] * 7 + [10.0],
}


def main() -> None:
    parser_of(__doc__).parse_args()
    policies: dict[str, Callable[[], Policy]] = {
        "round robin": round_robin,
        "fewest groups": lambda: fewest_groups,
        "manager": lambda: by_the_manager,
    }
    rows: list[Row] = []
    for (case, slowness), groups in product(CASES.items(), (16, 64)):
        for name, make in policies.items():
            rows.append({"case": case, "groups": groups, "policy": name, **simulate(slowness, groups, make())})
    settings = {"simulated": "gservers and time", "siblings": SIBLINGS}
    report("bench_routing", settings | {"mean_tokens": MEAN_TOKENS, "capacity": CAPACITY}, rows)


if __name__ == "__main__":
    main()
