"""The gservers as the manager sees them, and which group goes to which.

All requests of a group go to one gserver, so that siblings share the prompt's cache; a new group
goes to the gserver with the fewest groups in flight. Pure, no I/O.

Invariant: only a gserver that serves the current weights is given a group.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from streamrl.transport.generation import INITIAL_WEIGHT_VERSION, ServerInfo

Load = int | str
"""A group's sequence number, or the name of a prompt of an evaluation."""


class Standing(Enum):
    """What the manager knows about a gserver."""

    UNCHECKED = "unchecked"
    """Registered; what it serves is not known (any more)."""
    SERVING = "serving"
    """Serves the current weights: takes groups."""
    EVICTED = "evicted"
    """Serves other weights, or failed in a weight update: waits for the next update."""
    SILENT = "silent"
    """No heartbeat."""


@dataclass(eq=False, slots=True)
class Gserver:
    """One registered gserver process; a restarted one is another `Gserver`."""

    index: int
    address: str
    host: str = ""
    """Of its process, as it calls itself."""
    standing: Standing = Standing.UNCHECKED
    info: ServerInfo | None = None
    """What it can do, once it was asked."""
    failed_version: int | None = None
    """The last weight update that failed because of it."""
    failed_catch_ups: int = 0
    """How often in a row it could not be brought to the current weights."""
    stuck: bool = False
    """Its generation was paused and could not be resumed."""
    groups: set[Load] = field(default_factory=set)
    """What is routed to it and still in flight."""

    @property
    def name(self) -> str:
        return f"gserver/{self.index}"


def serves(label: str, version: int) -> bool:
    """Whether a gserver that calls its weights `label` serves `version`; a fresh server says `default`."""
    return label == str(version) or (version == 0 and label == INITIAL_WEIGHT_VERSION)


class Fleet:
    """Standing and load of every gserver, and the routes of the groups in flight."""

    def __init__(self) -> None:
        self.news = 0
        """Grows whenever a gserver is heard of."""
        self._gservers: dict[int, Gserver] = {}
        self._routes: dict[Load, Gserver] = {}

    def join(self, index: int, address: str, *, host: str = "") -> Gserver:
        """A process took the place `index`."""
        gserver = Gserver(index, address, host)
        self._gservers[index] = gserver
        return gserver

    def get(self, index: int) -> Gserver | None:
        return self._gservers.get(index)

    def all(self) -> list[Gserver]:
        """By index."""
        return [self._gservers[index] for index in sorted(self._gservers)]

    def is_member(self, gserver: Gserver) -> bool:
        """Whether no other process took its place."""
        return self._gservers.get(gserver.index) is gserver

    def has_news_since(self, news: int) -> bool:
        """Whether a gserver was heard of after `news` was read."""
        return self.news != news

    def serving(self) -> list[Gserver]:
        """Those that take groups, by index."""
        return [g for g in self.all() if g.standing is Standing.SERVING]

    def candidates(self, version: int) -> list[Gserver]:
        """Whom a weight update to `version` should reach: all that are heard of.

        Those that failed an earlier attempt at the same version come only if there is no other.
        """
        heard = [g for g in self.all() if g.standing is not Standing.SILENT]
        return [g for g in heard if g.failed_version != version] or heard

    def updated(self, members: Collection[Gserver]) -> None:
        """Only `members` have, or are about to have, the current weights."""
        for gserver in self.all():
            if gserver not in members and gserver.standing is Standing.SERVING:
                gserver.standing = Standing.EVICTED

    def assign(self, load: Load, *, avoid: str = "") -> Gserver | None:
        """Route `load` to the least loaded gserver at another address than `avoid`; None if there is none."""
        choice = min(
            (g for g in self.serving() if g.address != avoid),
            key=lambda g: (len(g.groups), g.index),
            default=None,
        )
        if choice is not None:
            self.release(load)
            choice.groups.add(load)
            self._routes[load] = choice
        return choice

    def release(self, load: Load) -> None:
        """`load` is no longer in flight."""
        gserver = self._routes.pop(load, None)
        if gserver is not None:
            gserver.groups.discard(load)
