"""An evaluator between a real manager and whatever gservers a test has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from streamrl.config import Config
from streamrl.records.evaluation import EvaluationReport
from streamrl.rollout.evaluator import serve
from streamrl.transport.control import Evaluate, FinishRun
from tests.gserver.harness import Run, managed


class Stage:
    def __init__(self, run: Run, evaluator: asyncio.Task[None]) -> None:
        self.run = run
        self.evaluator = evaluator
        self._known = 0

    async def ask(self, version: int = 0) -> None:
        await self.run.client.evaluate(Evaluate(policy_version=version, step=version))

    async def report(self) -> EvaluationReport:
        """The next one."""
        async with asyncio.timeout(60):
            while not (reports := (await self.run.client.evaluations(self._known)).reports):
                assert not self.evaluator.done(), self.evaluator.exception()
        self._known += 1
        return reports[0]

    async def evaluate(self, version: int = 0) -> EvaluationReport:
        await self.ask(version)
        return await self.report()

    async def finish(self) -> None:
        """End the run and wait for the evaluator."""
        await self.run.client.finish_run(FinishRun(reason="done"))
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
