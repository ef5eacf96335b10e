"""Liveness: when a peer was last heard of, and from when on it counts as silent.

The one notion of it, for every process of the run at the manager (`gserver/manager/registry.py`), for workers at the
master (`request_reply.py`), for pushers at a DP head (`puller.py`) and heads at a pusher (`push_pull.py`), and for a
real SGLang server at its gserver (`gserver/sglang/monitor.py`). Pure: times in seconds are passed in, all on one clock.
What follows from silence is decided there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class LastHeard:
    """When one peer was last heard of; it is silent after `patience` seconds without a word."""

    __slots__ = ("at", "patience")

    def __init__(self, *, now: float, patience: float) -> None:
        self.at = now
        """When it last said something; -inf: its connection has ended since, or it never did."""
        self.patience = patience

    def hear(self, *, now: float) -> None:
        """The peer said something."""
        self.at = now

    def end(self) -> None:
        """Its connection has ended: it is silent at once, until it is heard again."""
        self.at = -math.inf

    @property
    def ended(self) -> bool:
        """Whether its connection has ended and it was not heard since, or never."""
        return self.at == -math.inf

    @property
    def silent_at(self) -> float:
        """When it falls silent unless it is heard before."""
        return self.at + self.patience

    def is_silent(self, *, now: float) -> bool:
        """Whether nothing was heard for `patience` seconds."""
        return now >= self.silent_at

    def seconds(self, *, now: float) -> float:
        """Return how long ago it was heard."""
        return now - self.at

    def excuse(self, seconds: float) -> None:
        """Do not count the last `seconds` as silence: it could not be heard then, whatever it said."""
        self.at += seconds


def next_silence(peers: Iterable[LastHeard]) -> float | None:
    """Return when the first of `peers` falls silent unless it is heard before; None: there are none."""
    return min((peer.silent_at for peer in peers), default=None)
