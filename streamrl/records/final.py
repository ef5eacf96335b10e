"""`final.json`: how a run stood when it ended."""

from __future__ import annotations

from typing import Any

import msgspec

FINAL_FILE = "final.json"


class Final(msgspec.Struct, frozen=True, kw_only=True):
    """The manager's last status and the master's own counts, in groups unless said otherwise."""

    status: dict[str, Any] | None
    """The manager's last `Status` (`transport/control.py`) after the master reported everything; None if it did not
    reply."""
    policy_version: int = 0
    train_seconds: float = 0.0
    """Since the first step, without times in which the run was down."""
    groups_trained: int
    """Groups that entered a training step."""
    groups_held: int
    """Groups stored with the trainer that no step used."""
    groups_duplicated: int = 0
    """Groups that arrived again after they had been stored; refused."""
    groups_refused: int = 0
    """Groups that could not belong to this run, or that broke a limit."""
    max_staleness: int = 0
    """η, in policy versions."""
    over_age: str = ""
    """What happened to tokens older than that: `mask`, `wait` or `drop`."""
    tokens_dropped: int = 0
    """Sampled tokens of the groups that were discarded as too old."""
