"""Liveness: when the last message of a peer arrived, and when the peer counts as silent.

All processes share this definition: the manager for members (`gserver/manager/registry.py`), the master for workers
(`request_reply.py`), a DP head for pushers (`puller.py`), a pusher for heads (`push_pull.py`), and a gserver for its
SGLang server (`gserver/sglang/monitor.py`). Pure: times in seconds are passed in, all on one clock. The consequences of
silence are decided in those modules.
"""

from __future__ import annotations

from collections.abc import Iterable


class LastHeard:
    """Time of a peer's last message; the peer is silent after `patience` seconds without one."""

    __slots__ = ("at", "patience")

    def __init__(self, *, now: float, patience: float) -> None:
        self.at = now
        """Time of the last message."""
        self.patience = patience

    def hear(self, *, now: float) -> None:
        """Note a message of the peer."""
        self.at = now

    @property
    def silent_at(self) -> float:
        """When it becomes silent if no message arrives before."""
        return self.at + self.patience

    def is_silent(self, *, now: float) -> bool:
        """Whether no message came for `patience` seconds."""
        return now >= self.silent_at

    def seconds(self, *, now: float) -> float:
        """Return the time since its last message."""
        return now - self.at

    def excuse(self, seconds: float) -> None:
        """Do not count the last `seconds` as silence: messages could not be received then."""
        self.at += seconds


def next_silence(peers: Iterable[LastHeard]) -> float | None:
    """Return when the first of `peers` becomes silent if no message arrives before; None if there are no peers."""
    return min((peer.silent_at for peer in peers), default=None)
