"""The gservers as the manager sees them, and which group goes to which.

All requests of a group, siblings and turns alike, go to one gserver, so that they share its prompt cache; a new
group goes to the gserver that has the least to do for its speed, among those that have a place. Pure, no I/O.

Invariants: only a gserver that serves the current weights, is not being drained and is not full is given a group;
no call looks at all gservers or all groups, except those that say so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

from streamrl.gserver.cheapest import Cheapest
from streamrl.gserver.load import GserverLoad, Work
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION, ServerInfo

Key = int | str
"""A group's sequence number, or the name of a prompt of an evaluation."""

ONE_REQUEST = Work(1, 0)
LEAST_SPEED = 1e-3
"""Tokens in a second; so that one that stands still is the last choice, and no more."""


class Standing(Enum):
    """What the manager knows about a gserver."""

    UNCHECKED = "unchecked"
    """Registered; what it serves is not known (any more)."""
    SERVING = "serving"
    """Serves the current weights: takes groups."""
    EVICTED = "evicted"
    """Serves other weights, or failed in a weight update: waits until it has the current ones."""
    SILENT = "silent"
    """No heartbeat."""


class Gserver:
    """One registered gserver process; a restarted one is another `Gserver`.

    `on_change` hears of changes that routing depends on.
    """

    def __init__(self, index: int, address: str, *, host: str = "", on_change: Callable[[Gserver], None]) -> None:
        self.index = index
        self.address = address
        self.host = host
        """Of its process, as it calls itself."""
        self.failed_version: int | None = None
        """The last weight update that failed because of it."""
        self.failed_catch_ups = 0
        """How often in a row it could not be brought to the current weights, though it lived on."""
        self.failing = False
        """It could not be brought to them just now, and has not been heard of since: it may have died of it."""
        self.tells_received = True
        """Whether one that stages no weights can tell checksums of those that came, as far as known."""
        self.stuck = False
        """Its generation was paused and could not be resumed."""
        self.groups: dict[Key, Work] = {}
        """What is routed to it and still in flight."""
        self.load = GserverLoad()
        self._on_change = on_change
        self._standing = Standing.UNCHECKED
        self._draining = False
        self._info: ServerInfo | None = None

    def forgive(self) -> None:
        """What failed was another version."""
        self.failed_catch_ups = 0
        self.failing = False

    @property
    def name(self) -> str:
        return f"gserver/{self.index}"

    @property
    def standing(self) -> Standing:
        return self._standing

    @standing.setter
    def standing(self, standing: Standing) -> None:
        if standing is not self._standing:
            self._standing = standing
            self._on_change(self)

    @property
    def draining(self) -> bool:
        """It finishes what it has, and is given nothing more."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._on_change(self)

    @property
    def info(self) -> ServerInfo | None:
        """What it can do, once it was asked."""
        return self._info

    @info.setter
    def info(self, info: ServerInfo) -> None:
        self._info = info
        self.load.most_requests = info.max_running_requests or 0
        self.load.most_tokens = info.max_total_num_tokens or 0
        self._on_change(self)

    @property
    def ranks(self) -> int:
        """How many places it takes in a weight group."""
        return self._info.tp_size if self._info is not None else 1

    @property
    def takes_groups(self) -> bool:
        """Whether it may be given groups when it has a place."""
        return self._standing is Standing.SERVING and not self._draining


def serves(label: str, version: int) -> bool:
    """Whether a gserver that calls its weights `label` serves `version`; a fresh server says `default`."""
    return label == str(version) or (version == 0 and label == INITIAL_WEIGHT_VERSION)


class Fleet:
    """Standing and load of every gserver, and the routes of the groups in flight.

    `on_place` is called when a gserver takes groups that did not, or has a place again.
    """

    def __init__(self, *, on_place: Callable[[], None] = lambda: None) -> None:
        self.news = 0
        """Grows whenever a gserver is heard of."""
        self._on_place = on_place
        self._gservers: dict[int, Gserver] = {}
        self._serving: dict[str, Gserver] = {}  # by address
        self._with_place: Cheapest[Gserver] = Cheapest()
        self._routes: dict[Key, Gserver] = {}
        self._routed = Work(0, 0)
        self._speeds: dict[int, float] = {}
        self._speed_sum = 0.0

    def join(self, index: int, address: str, *, host: str = "") -> Gserver:
        """A process took the place `index`."""
        self.remove(index)
        gserver = Gserver(index, address, host=host, on_change=self._refresh)
        self._gservers[index] = gserver
        return gserver

    def remove(self, index: int) -> None:
        """The process at `index` is gone for good; what was routed to it stays so until it is routed anew."""
        gserver = self._gservers.pop(index, None)
        if gserver is not None:
            self._speed_sum -= self._speeds.pop(index, 0.0)
            self._refresh(gserver)

    def get(self, index: int) -> Gserver | None:
        return self._gservers.get(index)

    def all(self) -> list[Gserver]:
        """By index; looks at all."""
        return [self._gservers[index] for index in sorted(self._gservers)]

    def is_member(self, gserver: Gserver) -> bool:
        """Whether no other process took its place."""
        return self._gservers.get(gserver.index) is gserver

    def has_news_since(self, news: int) -> bool:
        """Whether a gserver was heard of after `news` was read."""
        return self.news != news

    def serving(self) -> list[Gserver]:
        """Those that take groups, full or not, by index; looks at all."""
        return sorted(self._serving.values(), key=lambda g: g.index)

    @property
    def serving_count(self) -> int:
        return len(self._serving)

    def serving_at(self, address: str) -> Gserver | None:
        """The one at `address`, if it takes groups."""
        return self._serving.get(address)

    @property
    def has_place(self) -> bool:
        """Whether a group could be routed now."""
        return len(self._with_place) > 0

    def candidates(self, version: int) -> list[Gserver]:
        """Whom a weight update to `version` should reach: all that are heard of; looks at all.

        Those that failed an earlier attempt at the same version come only if there is no other.
        """
        heard = [g for g in self.all() if g.standing is not Standing.SILENT]
        return [g for g in heard if g.failed_version != version] or heard

    def updated(self, members: Collection[Gserver]) -> None:
        """Only `members` have, or are about to have, the current weights; looks at all."""
        for gserver in self.all():
            if gserver not in members and gserver.standing is Standing.SERVING:
                gserver.standing = Standing.EVICTED

    def measured(self, gserver: Gserver, stats: dict[str, float], *, now: float) -> None:
        """A heartbeat of `gserver` told `stats`."""
        gserver.load.measure(stats, now=now)
        first = gserver.load.speed is not None and not self._speeds
        if gserver.load.speed is not None:
            self._speed_sum += gserver.load.speed - self._speeds.get(gserver.index, 0.0)
            self._speeds[gserver.index] = gserver.load.speed
        for other in self.all() if first else [gserver]:  # those whose speed is not known count as average from now on
            self._refresh(other)

    def assign(self, key: Key, work: Work = ONE_REQUEST, *, now: float, avoid: str = "") -> Gserver | None:
        """Route `key` to the gserver with the least to do, not at the address `avoid`; None: none has a place.

        A `work` without tokens is taken to have as many as others have on average.
        """
        avoided = self._serving.get(avoid)
        choice = self._with_place.best(but=avoided.index if avoided is not None else None)
        if choice is not None:
            self.assign_to(choice, key, work, now=now)
        return choice

    def assign_to(self, gserver: Gserver, key: Key, work: Work, *, now: float) -> None:
        """Route `key` to `gserver`, whether it has a place or not."""
        if not work.tokens:
            work = Work(work.requests, round(work.requests * self._tokens_each))
        self.release(key)
        gserver.groups[key] = work
        self._routes[key] = gserver
        self._change(gserver, Work(0, 0), work, now=now)

    def reassign(self, key: Key, *, now: float, avoid: str = "") -> Gserver | None:
        """Route what `key` has in flight to another gserver than that at `avoid`; None: none has a place.

        The one that has it keeps it if it takes groups and is not to be avoided.
        """
        gserver = self._routes.get(key)
        if gserver is not None and gserver.address != avoid and self._serving.get(gserver.address) is gserver:
            return gserver  # where it has its place and its cache
        return self.assign(key, gserver.groups[key] if gserver is not None else ONE_REQUEST, now=now, avoid=avoid)

    def change(self, key: Key, work: Work, *, now: float) -> None:
        """`key` has `work` in flight now; nothing changes if it is not routed."""
        gserver = self._routes.get(key)
        if gserver is not None:
            before, gserver.groups[key] = gserver.groups[key], work
            self._change(gserver, before, work, now=now)

    def release(self, key: Key) -> None:
        """`key` is no longer in flight."""
        gserver = self._routes.pop(key, None)
        if gserver is not None:
            self._change(gserver, gserver.groups.pop(key), Work(0, 0), now=0.0)

    @property
    def _tokens_each(self) -> float:
        return self._routed.tokens / self._routed.requests if self._routed.requests else 0.0

    def _change(self, gserver: Gserver, before: Work, after: Work, *, now: float) -> None:
        gserver.load.change(before, after, now=now)
        self._routed = Work(
            self._routed.requests + after.requests - before.requests, self._routed.tokens + after.tokens - before.tokens
        )
        self._refresh(gserver)

    def _refresh(self, gserver: Gserver) -> None:
        """Bring the order up to what is known of `gserver`."""
        member = self.is_member(gserver)
        had_place = gserver.index in self._with_place
        if member and gserver.takes_groups:
            self._serving[gserver.address] = gserver
        elif self._serving.get(gserver.address) is gserver:
            del self._serving[gserver.address]
        if member and gserver.takes_groups and not gserver.load.full:
            self._with_place.put(gserver.index, self._cost(gserver), gserver)
            if not had_place:
                self._on_place()
        elif member or gserver.index not in self._gservers:
            self._with_place.remove(gserver.index)

    def _cost(self, gserver: Gserver) -> float:
        """Load for its speed; one whose speed is not known counts as average."""
        average = self._speed_sum / len(self._speeds) if self._speeds else 1.0
        speed = max(gserver.load.speed or average, LEAST_SPEED)
        return (gserver.load.size(self._tokens_each) + 1) / speed
