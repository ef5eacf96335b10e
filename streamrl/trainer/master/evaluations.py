"""The master's side of evaluations: asks the manager for them, and takes in what they found.

Owns which versions were asked for and which were reported. Invariant: the run waits for an evaluation only at its end,
and then no longer than `evaluation.end_timeout_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from streamrl.config import Config
from streamrl.errors import StreamRLError
from streamrl.records import progress
from streamrl.records.evaluation import EvaluationReport
from streamrl.transport.control import NO_EVALUATOR, Evaluate
from streamrl.transport.manager_client import ControlClient

log = logging.getLogger(__name__)


class EvaluationRequests:
    """Asks for evaluations that are due, and passes each report on."""

    def __init__(self, config: Config, *, client: ControlClient, write: Callable[[EvaluationReport], None]) -> None:
        """`write` is given each report once."""
        self._config = config
        self._client = client
        self._write = write
        self._asked: set[int] = set()
        self._reported: set[int] = set()
        self._known = 0
        """How many reports the manager has sent."""

    async def begin(self, version: int, *, was_due: bool) -> None:
        """Ask for the evaluation that is due when the run begins with `version`, if one is.

        A resumed run asks again for the evaluation of its checkpoint, if that `was_due` and got lost.
        """
        chosen = self._config.evaluation
        if self._config.run.resume_from is None:
            due = chosen.at_start
        else:
            due = was_due and not progress.evaluated(self._config.run_dir, policy_version=version)
        if due:
            await self.ask(version)

    async def ask(self, version: int, *, training_over: bool = False) -> None:
        """Ask for an evaluation of `version`, which the gservers have; a second one of the same version is not made.

        `training_over`: the run ends after it.
        """
        message = Evaluate(policy_version=version, step=version, training_over=training_over)
        if version not in self._asked or training_over:
            self._asked.add(version)
            await self._client.evaluate(message)

    async def follow(self) -> None:
        """Take in reports until the run is over."""
        over = False
        while not over:
            over = await self._take_in()

    async def take_what_is_done(self) -> None:
        """Take in what was reported by now; an evaluation that is still under way is not waited for."""
        status = (await self._client.status()).evaluation
        if status is not None and status.done > self._known:
            await self._take_in()
        unfinished = max(self._asked, default=None)
        if unfinished is not None and unfinished not in self._reported:
            log.warning(
                "the run ends before the evaluation of version %d is done: %s",
                *(unfinished, NO_EVALUATOR if await self._is_unattended() else "set evaluation.at_end to wait for it"),
            )

    async def wait_for(self, version: int) -> str:
        """Wait until `version` is reported; return what to add to the reason why the run ended, empty if all is well.

        Raises `StreamRLError` if the manager ends the run meanwhile.
        """
        seconds = self._config.evaluation.end_timeout_seconds
        if version not in self._reported and await self._is_unattended():
            log.warning("the run waits up to %g s for the evaluation of version %d: %s", seconds, version, NO_EVALUATOR)
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
            if await self._is_unattended():
                return f"; {missed}: no evaluator has joined the run"
            log.warning("%s; the evaluator's log shows how far it is, and whether it waits for a gserver", missed)
            return f"; {missed}"
        return ""

    async def _is_unattended(self) -> bool:
        """Return whether no evaluator takes part in the run."""
        return all(process.role != "evaluator" for process in (await self._client.status()).processes)

    async def _take_in(self) -> bool:
        """Take in the next reports, none after a long poll without any; return whether the run is over."""
        reply = await self._client.evaluations(self._known)
        self._known += len(reply.reports)
        for report in reply.reports:
            self._reported.add(report.policy_version)
            self._write(report)
        return reply.stop
