"""The run as the manager tells it to people."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from streamrl.metrics import StepReport
from streamrl.transport.control.evaluations import EvaluationStatus
from streamrl.transport.control.members import Role


class ProcessStatus(msgspec.Struct, frozen=True):
    role: Role
    index: int
    address: str
    pid: int
    host: str
    silent_seconds: float
    """Since its last word."""
    stats: dict[str, float]
    waiting_for: str
    state: Literal["live", "silent", "evicted", "draining"]


class LedgerStatus(msgspec.Struct, frozen=True):
    policy_version: int
    max_staleness: int
    next_seq: int
    accepted: int
    trained: int
    """Of those accepted, the ones that the policy version was trained on."""
    running: int
    returned: int
    rejected: int
    dropped: int
    expired: int
    room: int
    given_up: int = 0
    """Of those rejected, prompts whose workers died again and again."""


class Status(msgspec.Struct, frozen=True):
    """The run as the manager sees it."""

    run: str
    state: Literal["joining", "running", "finished", "failed"]
    message: str
    """Why the run ended, or what it waits for."""
    ledger: LedgerStatus
    processes: list[ProcessStatus]
    last_step: StepReport | None
    publication: dict[str, Any]
    """State of the weight update in progress, and figures of the last one."""
    data_rows: int = 0
    """Rows of the training data; 0: not known yet."""
    evaluation: EvaluationStatus | None = None
    """None: the configuration asks for none."""
