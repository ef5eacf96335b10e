"""The rollout pool as the trainer's master uses it: methods of the gserver manager, which runs in the same process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from streamrl.architecture import Architecture
from streamrl.ledger import Ledger
from streamrl.records.evaluation import EvaluationReport
from streamrl.records.metrics import StepReport
from streamrl.transport.control import DataFacts, Scores, Status


class RolloutPool(Protocol):
    """See `gserver/manager/core.py: Manager`, which implements it."""

    ledger: Ledger
    save_requested: bool

    async def data(self) -> DataFacts: ...

    @property
    def reads_snapshots(self) -> bool: ...

    async def resync_needed(self) -> list[str]: ...

    def compare(self, version: int, tokens: Sequence[int], *, start: int) -> None: ...

    def scores(self, version: int) -> list[Scores]: ...

    def take_model(self, model: Architecture) -> None: ...

    def report(self, report: StepReport) -> None: ...

    def evaluate(self, version: int, *, training_over: bool) -> None: ...

    def on_evaluation(self, take: Callable[[EvaluationReport], None]) -> None: ...

    def status(self) -> Status: ...
