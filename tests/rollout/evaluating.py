"""An evaluator between a real manager and whatever gservers a test has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from streamrl.config import Config
from streamrl.records.evaluation import EvaluationReport
from streamrl.rollout.evaluator import serve
from streamrl.waits import first_of
from tests.gserver.harness import Run, managed


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


class Stage:
    def __init__(self, run: Run, evaluator: asyncio.Task[None]) -> None:
        self.run = run
        self.evaluator = evaluator
        self._known = 0

    async def ask(self, version: int = 0) -> None:
        self.run.manager.evaluate(version, training_over=False)

    async def report(self) -> EvaluationReport:
        """The next one."""
        next_report, _ = await first_of(self.run.next_report(self._known), _ended(self.evaluator))
        assert not next_report.cancelled(), self.evaluator.exception()
        self._known += 1
        report: EvaluationReport = next_report.result()
        return report

    async def evaluate(self, version: int = 0) -> EvaluationReport:
        await self.ask(version)
        return await self.report()

    async def finish(self) -> None:
        """End the run and wait for the evaluator."""
        self.run.manager.finish("done", stopped=False)
        async with asyncio.timeout(30):
            await self.evaluator


@asynccontextmanager
async def evaluating(config: Config, model_dir: Path, *, gservers: tuple[str, ...] = ()) -> AsyncIterator[Stage]:
    """With `gservers` (URLs) as members of the run."""
    async with managed(config) as run:
        for index, url in enumerate(gservers):
            await run.register("gserver", index, address=url)
        evaluator = asyncio.create_task(serve(config, manager_url=run.url, model_dir=model_dir), name="the evaluator")
        try:
            yield Stage(run, evaluator)
        finally:
            evaluator.cancel()
            await asyncio.wait([evaluator])
