"""Rollout workers that make evaluations, between a real manager and the gservers of a test. Training is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from streamrl.config import Config
from streamrl.records.evaluation import EvaluationReport
from streamrl.rollout.worker import serve
from streamrl.waits import first_of
from tests.gserver.harness import Run, managed


async def _one_ended(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


class Stage:
    def __init__(self, run: Run, workers: list[asyncio.Task[None]]) -> None:
        self.run = run
        self.workers = workers
        self._known = 0

    def ask(self, version: int = 0) -> None:
        self.run.manager.evaluate(version, training_over=True)

    async def report(self) -> EvaluationReport:
        """The next one."""
        next_report, _ = await first_of(self.run.next_report(self._known), _one_ended(self.workers))
        assert not next_report.cancelled(), [worker.exception() for worker in self.workers if worker.done()]
        self._known += 1
        report: EvaluationReport = next_report.result()
        return report

    async def evaluate(self, version: int = 0) -> EvaluationReport:
        self.ask(version)
        return await self.report()

    async def finish(self) -> None:
        """End the run and wait for the workers."""
        self.run.manager.finish("done", stopped=False)
        async with asyncio.timeout(30):
            await asyncio.gather(*self.workers)


@asynccontextmanager
async def evaluating(
    config: Config, model_dir: Path, *, gservers: tuple[str, ...] = (), workers: int = 1
) -> AsyncIterator[Stage]:
    """With `gservers` (URLs) as members of the run."""
    async with managed(config) as run:
        run.manager.groups.stop()
        await run.register("model_worker", address="tcp://127.0.0.1:9")  # no group goes there
        for index, url in enumerate(gservers):
            await run.register("gserver", index, address=url)
        tasks = [
            asyncio.create_task(
                serve(config, manager_url=run.url, index=index, model_dir=model_dir), name=f"rollout worker {index}"
            )
            for index in range(workers)
        ]
        try:
            yield Stage(run, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
