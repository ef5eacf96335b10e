"""The master's side of evaluations: requests due evaluations, and records their reports.

Invariant: the run waits for an evaluation only at its end, and no longer than `limits.evaluation_seconds`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from streamrl.config import Config
from streamrl.records import progress
from streamrl.records.evaluation import EvaluationReport
from streamrl.trainer.master.rollout_pool import RolloutPool
from streamrl.waits import Wakeup

log = logging.getLogger(__name__)


class EvaluationRequests:
    """Requests evaluations that are due, and passes each report on."""

    def __init__(self, config: Config, *, pool: RolloutPool, write: Callable[[EvaluationReport], None]) -> None:
        """`write` is called once with each report."""
        self._config = config
        self._pool = pool
        self._write = write
        self._newest_request: int | None = None
        self._reported: set[int] = set()
        self._changed = Wakeup()
        pool.on_evaluation(self._take)

    def begin(self, version: int, *, was_due: bool) -> None:
        """Request the evaluation that is due when the run begins with `version`, if one is.

        A resumed run requests the evaluation of its checkpoint again if it `was_due` and its report was lost.
        """
        chosen = self._config.evaluation
        due = chosen.at_start if self._config.run.resume_from is None else was_due
        if due and not progress.evaluated(self._config.run_dir, policy_version=version):
            self.request(version)

    def request(self, version: int, *, training_over: bool = False) -> None:
        """Request an evaluation of `version`, which the gservers serve; at most one of each version is made.

        `training_over`: the run ends after it.
        """
        self._newest_request = version
        self._pool.evaluate(version, training_over=training_over)

    def warn_of_unfinished(self) -> None:
        """Warn of an unfinished evaluation at the end of a run that does not wait for it."""
        version = self._newest_request
        if version is not None and version not in self._reported:
            log.warning(
                "the run ends before the evaluation of version %d is done: set evaluation.at_end to wait for it",
                version,
            )

    async def wait_for(self, version: int) -> str:
        """Wait for the report of `version`; return an addition to the reason of the run's end, empty if it arrived."""
        seconds = self._config.limits.evaluation_seconds
        if await self._changed.until(lambda: version in self._reported, timeout=seconds):
            return ""
        missed = f"the evaluation of version {version} was not finished within limits.evaluation_seconds = {seconds:g}"
        if (status := self._pool.status().evaluation) is not None:
            done = f"{status.prompts_done} of {status.prompts} prompts are done"
            missed += f" ({done if status.prompts else 'no rollout worker has opened the held-out data'})"
        log.warning("%s", missed)
        return f"; {missed}"

    def _take(self, report: EvaluationReport) -> None:
        self._reported.add(report.policy_version)
        self._write(report)
        self._changed.notify()
