"""Which evaluation is under way and which comes next. Pure.

Invariants: at most one is under way and at most one waits, the latest that was asked for; each is reported at
most once, whoever reports it.
"""

from __future__ import annotations

import logging

from streamrl.evaluation import EvaluationReport
from streamrl.transport.control.evaluations import Evaluate, EvaluationStatus, EvaluationTask

log = logging.getLogger(__name__)


class EvaluationQueue:
    """Takes evaluations from the master, gives them to an evaluator, keeps what it reports."""

    def __init__(self) -> None:
        self.reports: list[EvaluationReport] = []
        """In order of arrival."""
        self._asked = 0
        self._versions: set[int] = set()
        """That were asked for."""
        self._left_out = 0
        self._running: EvaluationTask | None = None
        self._owner = ""
        self._waiting: EvaluationTask | None = None

    def ask(self, message: Evaluate) -> None:
        """An evaluation is due; one that still waits gives way to it, one of the same version does for it."""
        if message.policy_version in self._versions:
            return
        self._versions.add(message.policy_version)
        task = EvaluationTask(number=self._asked, policy_version=message.policy_version, step=message.step)
        self._asked += 1
        if self._running is not None:
            log.info(
                "the evaluation of version %d waits for that of version %d to end",
                *(task.policy_version, self._running.policy_version),
            )
        self._wait(task)

    def has_for(self, owner: str) -> bool:
        """Whether `take` would give `owner` something."""
        return self._waiting is not None if self._running is None else self._owner == owner

    def take(self, owner: str) -> EvaluationTask | None:
        """The next evaluation; whoever asks while its own is under way has lost it, and gets it again."""
        if self._running is None:
            self._running, self._waiting, self._owner = self._waiting, None, owner
        return self._running if self._owner == owner else None

    def give_back(self, owner: str) -> None:
        """`owner` is gone: its evaluation is made anew, unless a later one waits already."""
        if self._running is None or self._owner != owner:
            return
        lost, self._running = self._running, None
        log.warning("%s was lost in the evaluation of version %d", owner, lost.policy_version)
        if self._waiting is None:
            self._wait(lost)
        else:
            self._leave_out(lost, self._waiting)

    def done(self, number: int, report: EvaluationReport) -> bool:
        """Take in a report; answers False for one of an evaluation that was reported or left out before."""
        if self._running is not None and self._running.number == number:
            self._running = None
        elif self._waiting is not None and self._waiting.number == number:
            self._waiting = None  # given back too early: its evaluator had only been silent
        else:
            return False
        self.reports.append(report)
        return True

    def status(self) -> EvaluationStatus:
        return EvaluationStatus(
            running=self._running,
            waiting=self._waiting,
            done=len(self.reports),
            left_out=self._left_out,
            last=self.reports[-1] if self.reports else None,
        )

    def _wait(self, task: EvaluationTask) -> None:
        if self._waiting is not None:
            self._leave_out(self._waiting, task)
        self._waiting = task

    def _leave_out(self, task: EvaluationTask, later: EvaluationTask) -> None:
        self._left_out += 1
        log.warning(
            "the evaluation of version %d is left out: it had not begun when that of version %d was asked for; "
            "evaluate less often, or fewer prompts, or raise evaluation.max_concurrent",
            *(task.policy_version, later.policy_version),
        )
