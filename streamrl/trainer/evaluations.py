"""The trainer's side of evaluations: asks for them, and takes in what they found.

Owns which versions were asked for and which reported. The run waits for an evaluation only at its end, and
then no longer than `evaluation.end_timeout_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from streamrl import progress
from streamrl.config import Config
from streamrl.errors import StreamRLError
from streamrl.evaluation import EvaluationReport
from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.evaluations import Evaluate

log = logging.getLogger(__name__)


class EvaluationDesk:
    """Between the master and the manager; `write` keeps a report."""

    def __init__(self, config: Config, *, client: ControlClient, write: Callable[[EvaluationReport], None]) -> None:
        self._config = config
        self._client = client
        self._write = write
        self._asked: set[int] = set()
        self._reported: set[int] = set()
        self._known = 0
        """Reports that the manager has sent."""

    async def begin(self, version: int) -> None:
        """The run begins with `version`: ask for what is due there.

        A resumed run also makes the evaluation anew that was asked for at its checkpoint and got lost.
        """
        chosen = self._config.evaluation
        if self._config.run.resume_from is None:
            due = chosen.at_start
        else:
            lost = bool(chosen.every_steps) and version % chosen.every_steps == 0
            due = lost and not progress.evaluated(self._config.run_dir, policy_version=version)
        if due:
            await self.ask(version)

    async def ask(self, version: int, *, training_over: bool = False) -> None:
        """The gservers have `version`, and an evaluation is due; a second one of the same version is not made."""
        message = Evaluate(policy_version=version, step=version, training_over=training_over)
        if version not in self._asked or training_over:
            self._asked.add(version)
            await self._client.evaluate(message)

    async def follow(self) -> None:
        """Take in reports until the run is over."""
        over = False
        while not over:
            over = await self._take_in()

    async def wait_for(self, version: int) -> str:
        """Until `version` is reported; answers what to add to the run's last word, empty if all is well."""
        seconds = self._config.evaluation.end_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                while version not in self._reported:
                    over = await self._take_in()
                    if over and version not in self._reported:
                        raise StreamRLError(
                            f"the manager ended the run in the evaluation of version {version}; its log says why"
                        )
        except TimeoutError:
            missed = (
                f"the evaluation of version {version} was not finished within "
                f"evaluation.end_timeout_seconds = {seconds:g}"
            )
            log.warning("%s; is there an evaluator, and does it get a gserver? its log says more", missed)
            return f"; {missed}"
        return ""

    async def _take_in(self) -> bool:
        """The next reports, none after a long poll without any; answers whether the run is over."""
        reply = await self._client.evaluations(self._known)
        self._known += len(reply.reports)
        for report in reply.reports:
            self._reported.add(report.policy_version)
            self._write(report)
        return reply.stop
