"""The master's side of evaluations, against a real manager and a rollout worker played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.config import Config
from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport
from streamrl.trainer.master.evaluations import EvaluationRequests
from streamrl.transport.control import Admit, DataFacts, HeldOutResult
from tests.evaluations import make_report
from tests.gserver.harness import Run, managed, small_config
from tests.gserver.scripted import scripted

HELD_OUT = Admit(worker=0, count=1, data=DataFacts(rows=2), held_out=True)


@asynccontextmanager
async def desk(config: Config) -> AsyncIterator[tuple[EvaluationRequests, Run, list[EvaluationReport]]]:
    written: list[EvaluationReport] = []
    async with managed(config) as run, scripted() as (gserver,):
        await run.register("rollout")
        await run.register("gserver", address=gserver.url)
        yield EvaluationRequests(config, pool=run.manager, write=written.append), run, written


async def make_prompt(run: Run) -> None:
    """Make one of the two prompts of the evaluation that is due."""
    async with asyncio.timeout(30):
        (prompt,) = (await run.client.admit(HELD_OUT)).admissions
    figures = {"rewards": [1.0], "lengths": [3]}
    await run.client.held_out_result(HeldOutResult(0, prompt.evaluation, prompt.seq, **figures))  # type: ignore[arg-type]


def evaluating(
    folder: Path, *, run: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **evaluation: Any
) -> Config:
    return small_config(folder, evaluation=evaluation, run=run or {}, limits=limits or {})


def versions(reports: list[EvaluationReport]) -> list[int]:
    return [report.policy_version for report in reports]


async def test_the_end_waits_for_the_last_evaluation(tmp_path: Path) -> None:
    async with desk(evaluating(tmp_path, at_end=True)) as (evaluations, run, written):
        evaluations.request(9)
        waiting = asyncio.create_task(evaluations.wait_for(9))
        await make_prompt(run)
        assert not waiting.done()
        await make_prompt(run)
        assert await asyncio.wait_for(waiting, 30) == ""
        assert versions(written) == [9]
        assert await evaluations.wait_for(9) == ""


async def test_the_end_does_not_wait_for_ever_and_names_the_prompts_that_are_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(evaluating(tmp_path, at_end=True, limits={"evaluation_seconds": 1.0})) as (evaluations, run, _):
        evaluations.request(9)
        waiting = asyncio.create_task(evaluations.wait_for(9))
        await make_prompt(run)
        reason = await asyncio.wait_for(waiting, 30)
    missed = "the evaluation of version 9 was not finished within limits.evaluation_seconds = 1"
    assert reason == f"; {missed} (1 of 2 prompts are done)"
    assert missed in caplog.text


@pytest.mark.parametrize(
    ("resumed", "was_due", "recorded", "due"),
    [
        (False, False, [], True),  # evaluation.at_start
        (True, False, [], False),
        (True, True, [], True),  # it was asked for at the checkpoint, and was lost
        (True, True, [10], False),
    ],
)
async def test_what_is_due_at_the_beginning(
    tmp_path: Path, resumed: bool, was_due: bool, recorded: list[int], due: bool
) -> None:
    config = evaluating(tmp_path, at_start=True)
    if resumed:
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, resume_from="somewhere"))
    config.run_dir.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(make_report(version)) + b"\n" for version in recorded]
    (config.run_dir / EVALUATIONS_FILE).write_bytes(b"".join(lines))
    async with desk(evaluating(tmp_path, at_start=True)) as (_, run, _):
        evaluations = EvaluationRequests(config, pool=run.manager, write=lambda report: None)
        evaluations.begin(10 if resumed else 0, was_due=was_due)
        status = run.manager.status().evaluation
        assert status is not None
        assert (status.waiting is not None) == due
