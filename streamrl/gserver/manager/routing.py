"""Assignment of groups to gservers.

All requests of a group, siblings and turns alike, go to one gserver, so that they share its prompt cache. A new group
goes to the gserver with the least load relative to its speed (`gserver.py`), among those with capacity. Pure, no I/O.

Invariants: only a serving gserver that is not full is given a group; no call visits all gservers or all groups unless
its docstring mentions it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from streamrl.gserver.manager.gserver import NO_WORK, Gserver, Route, Work
from streamrl.gserver.manager.registry import MemberEvent, MemberState

Item = TypeVar("Item")

LEAST_SPEED = 1e-3
"""Tokens per second; a lower bound, so that a gserver that stands still is the last choice but no error."""
SLACK = 64
"""Outdated entries that a heap keeps in addition to twice the number of valid ones."""


class Fleet:
    """The gservers of the run, and the work routed to them: each group, or prompt of an evaluation, has a `Route`.

    `on_capacity` is called when a gserver begins to take groups, or has capacity again.
    """

    def __init__(self, *, on_capacity: Callable[[], None] = lambda: None) -> None:
        self._on_capacity = on_capacity
        self._gservers: dict[int, Gserver] = {}
        self._serving: dict[str, Gserver] = {}  # by address: those that take groups
        self._with_capacity: LeastLoadedHeap[Gserver] = LeastLoadedHeap()
        self._routed = NO_WORK
        self._speeds: dict[int, float] = {}
        self._speed_sum = 0.0

    def join(self, gserver: Gserver) -> None:
        """Give `gserver` its place.

        A gserver that leaves, or that another one replaces, is dropped when its state changes; its work stays routed to
        it until it is routed again.
        """
        self._gservers[gserver.index] = gserver
        gserver.on_change = self._refresh
        self._refresh(gserver)

    def all(self) -> list[Gserver]:
        """Return all gservers, by index."""
        return [self._gservers[index] for index in sorted(self._gservers)]

    def serving(self) -> list[Gserver]:
        """Return the gservers that take groups, full or not, by index; visits all."""
        return sorted(self._serving.values(), key=lambda g: g.index)

    @property
    def serving_count(self) -> int:
        """Number of gservers that take groups, full or not."""
        return len(self._serving)

    def serving_at(self, address: str) -> Gserver | None:
        """Return the gserver at `address`, if it takes groups."""
        return self._serving.get(address)

    def at(self, address: str) -> Gserver | None:
        """Return the gserver at `address`, whether it takes groups or not; visits all."""
        return next((gserver for gserver in self._gservers.values() if gserver.address == address), None)

    @property
    def has_capacity(self) -> bool:
        """Whether a group could be routed now."""
        return len(self._with_capacity) > 0

    def candidates(self, version: int) -> list[Gserver]:
        """Return the gservers for a weight update to `version`: all that are not silent; visits all.

        Those that failed an earlier attempt at the same version, or are suspect, are included only if there is no
        other.
        """
        heard = [gserver for gserver in self.all() if not gserver.silent]
        reached = [gserver for gserver in heard if gserver.state is not MemberState.SUSPECT] or heard
        return [gserver for gserver in reached if gserver.failed_version != version] or reached

    def updated(self, members: Collection[Gserver]) -> None:
        """Note that only `members` have, or are about to have, the current weights; visits all."""
        for gserver in self.all():
            if gserver not in members:
                gserver.handle(MemberEvent.PASSED_OVER)

    def measured(self, gserver: Gserver, stats: dict[str, float], *, now: float) -> None:
        """Update load and speed of `gserver` from the `stats` of a heartbeat."""
        gserver.load.measure(stats, now=now)
        first = gserver.load.speed is not None and not self._speeds
        if gserver.load.speed is not None:
            self._speed_sum += gserver.load.speed - self._speeds.get(gserver.index, 0.0)
            self._speeds[gserver.index] = gserver.load.speed
        for other in self.all() if first else [gserver]:  # gservers of unknown speed count as average from now on
            self._refresh(other)

    def assign(self, work: Work, *, now: float, full: bool = False) -> Route | None:
        """Route `work` to the gserver with the least load; return None if none has capacity.

        A `work` without tokens counts with the average of the other requests. `full`: if none has capacity, visit all
        and take one without capacity.
        """
        choice = self._with_capacity.first()
        if choice is None and full:
            choice = min(self._serving.values(), key=self._cost, default=None)
        return self.assign_to(choice, work, now=now) if choice is not None else None

    def assign_to(self, gserver: Gserver, work: Work, *, now: float) -> Route:
        """Route `work` to `gserver`, whether it has capacity or not."""
        route = Route(gserver, NO_WORK)
        gserver.routes.add(route)
        self.change(route, self._with_tokens(work), now=now)
        return route

    def reassign(self, route: Route | None, *, now: float, avoid: str = "") -> Gserver | None:
        """Route the work in flight of `route` to a gserver that is not at `avoid`; return None if none has capacity.

        The present gserver keeps it if it takes groups and is not to be avoided. Work that is not accounted for has no
        route, and goes to any gserver that takes groups.
        """
        if route is None:
            return next((gserver for gserver in self.serving() if gserver.address != avoid), None)
        gserver = route.gserver
        if gserver.address != avoid and self._serving.get(gserver.address) is gserver:
            return gserver  # its slots and its cache are there
        avoided = self._serving.get(avoid)
        choice = self._with_capacity.first(excluding=avoided.index if avoided is not None else None)
        if choice is not None:
            work = self._with_tokens(route.work)
            self.release(route)
            route.gserver = choice
            choice.routes.add(route)
            self.change(route, work, now=now)
        return choice

    def change(self, route: Route, work: Work, *, now: float) -> None:
        """Set the work in flight of `route`."""
        before, route.work = route.work, work
        gserver = route.gserver
        gserver.load.change(before, work, now=now)
        self._routed = Work(
            self._routed.requests + work.requests - before.requests, self._routed.tokens + work.tokens - before.tokens
        )
        self._refresh(gserver)

    def release(self, route: Route) -> None:
        """Note that `route` has no more work in flight."""
        route.gserver.routes.discard(route)
        self.change(route, NO_WORK, now=0.0)

    def _with_tokens(self, work: Work) -> Work:
        return work if work.tokens else Work(work.requests, round(work.requests * self._mean_tokens))

    @property
    def _mean_tokens(self) -> float:
        """Mean context, in tokens, of all routed requests."""
        return self._routed.tokens / self._routed.requests if self._routed.requests else 0.0

    def _refresh(self, gserver: Gserver) -> None:
        """Update the indexes of this class from the state and load of `gserver`."""
        member = gserver.takes_part
        if not member:
            self._drop(gserver)
        had_capacity = gserver.index in self._with_capacity
        if gserver.serving:
            self._serving[gserver.address] = gserver
        elif self._serving.get(gserver.address) is gserver:
            del self._serving[gserver.address]
        if gserver.serving and not gserver.load.full:
            self._with_capacity.put(gserver.index, self._cost(gserver), gserver)
            if not had_capacity:
                self._on_capacity()
        elif member or gserver.index not in self._gservers:
            self._with_capacity.remove(gserver.index)

    def _drop(self, gserver: Gserver) -> None:
        if self._gservers.get(gserver.index) is gserver:
            del self._gservers[gserver.index]
            self._speed_sum -= self._speeds.pop(gserver.index, 0.0)

    def _cost(self, gserver: Gserver) -> float:
        """Return the load relative to the speed; a gserver of unknown speed counts as average."""
        average = self._speed_sum / len(self._speeds) if self._speeds else 1.0
        speed = max(gserver.load.speed or average, LEAST_SPEED)
        return (gserver.load.size(self._mean_tokens) + 1) / speed


class LeastLoadedHeap(Generic[Item]):
    """Items by integer key, with quick access to the one of least cost; each change takes logarithmic time.

    A heap with lazy deletion: outdated entries stay until they reach the top, or until there are too many.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[float, Item]] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: int) -> bool:
        return key in self._items

    def put(self, key: int, cost: float, item: Item) -> None:
        """Insert `item`, or set its cost."""
        known = self._items.get(key)
        self._items[key] = (cost, item)
        if known is None or known[0] != cost:
            heapq.heappush(self._heap, (cost, key))
            if len(self._heap) > 2 * len(self._items) + SLACK:
                self._heap = [(cost, key) for key, (cost, _) in self._items.items()]
                heapq.heapify(self._heap)

    def remove(self, key: int) -> None:
        """Remove the item with this `key`, if present."""
        self._items.pop(key, None)

    def first(self, *, excluding: int | None = None) -> Item | None:
        """Return the item with the smallest cost, and among equal costs the smallest key, except the key
        `excluding`."""
        aside: tuple[float, int] | None = None
        found: Item | None = None
        while self._heap:
            cost, key = self._heap[0]
            known = self._items.get(key)
            if known is not None and known[0] == cost:
                if key != excluding:
                    found = known[1]
                    break
                aside = cost, key
            heapq.heappop(self._heap)
        if aside is not None:
            heapq.heappush(self._heap, aside)
        return found
