"""Groups between the rollout workers, the manager and the master: admitted, routed, given up, settled."""

from __future__ import annotations

import msgspec

from streamrl.ledger import Fate


class Admit(msgspec.Struct, frozen=True):
    worker: int
    count: int
    """How many groups the worker can start."""
    data_rows: int = 0
    """Rows of the worker's training data: the same for all workers of a run; 0: not told."""
    ticket: str = ""
    """Names the call, so that asking again after a lost answer gives the same groups; set by the client."""


class Admission(msgspec.Struct, frozen=True):
    seq: int
    gserver: str
    """URL of the gserver for all requests of this group."""


class AdmitReply(msgspec.Struct, frozen=True):
    admissions: list[Admission]
    """Empty after a long poll without room."""
    policy_version: int
    stop: bool


class Route(msgspec.Struct, frozen=True):
    worker: int
    seq: int
    failed: str
    """URL of the gserver that failed."""


class RouteReply(msgspec.Struct, frozen=True):
    gserver: str
    """Empty: none is live now; ask again."""


class GroupInFlight(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    requests: int
    """That run or are still to begin."""
    tokens: int
    """Of the contexts of those that run."""


class InFlight(msgspec.Struct, frozen=True):
    """What of a worker's groups is in flight now, of those for which it has changed."""

    worker: int
    groups: list[GroupInFlight]


class Reject(msgspec.Struct, frozen=True):
    worker: int
    seq: int
    reason: str


class Settle(msgspec.Struct, frozen=True):
    """What the trainer has of groups, of those for which it has changed; may be told again, and in any order."""

    groups: list[Fate]


class Rejections(msgspec.Struct, frozen=True):
    rejected: list[Fate]
    """All since the n-th that was asked for. One that the trainer took or let go of meanwhile is not rejected."""


class DataFacts(msgspec.Struct, frozen=True):
    """The training data as the rollout workers see it."""

    rows: int
    """0: no worker has told yet; ask again."""
