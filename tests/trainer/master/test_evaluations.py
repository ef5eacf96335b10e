"""The master's side of evaluations, against a real manager and an evaluator played by the test."""

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
from streamrl.transport.control import NO_EVALUATOR, EvaluationResult, EvaluationTask, NextEvaluation
from tests.evaluations import make_report
from tests.gserver.harness import Run, managed, small_config


@asynccontextmanager
async def desk(config: Config) -> AsyncIterator[tuple[EvaluationRequests, Run, list[EvaluationReport]]]:
    written: list[EvaluationReport] = []
    async with managed(config) as run:
        await run.register("evaluator")
        yield EvaluationRequests(config, pool=run.manager, write=written.append), run, written


async def take(run: Run) -> EvaluationTask | None:
    """What waits for the evaluator now."""
    status = (await run.client.status()).evaluation
    if status is None or (status.running is None and status.waiting is None):
        return None
    return (await run.client.next_evaluation(NextEvaluation(evaluator=0))).task


async def tell(run: Run, task: EvaluationTask) -> None:
    report = make_report(task.policy_version)
    await run.client.evaluation_result(EvaluationResult(evaluator=0, task=task.id, report=report))


def evaluating(folder: Path, *, run: dict[str, Any] | None = None, **evaluation: Any) -> Config:
    return small_config(folder, evaluation=evaluation, run=run or {})


async def test_reports_are_kept_in_order(tmp_path: Path) -> None:
    async with desk(evaluating(tmp_path, every_steps=1)) as (evaluations, run, written):
        for version in (1, 2):
            evaluations.request(version)
            task = await take(run)
            assert task is not None
            assert task.policy_version == version
            await tell(run, task)
        evaluations.request(2)
        assert await take(run) is None  # the same version is not evaluated twice
    assert written == [make_report(1), make_report(2)]


async def test_the_end_waits_for_the_last_evaluation(tmp_path: Path) -> None:
    async with desk(evaluating(tmp_path, at_end=True)) as (evaluations, run, written):
        evaluations.request(9)
        waiting = asyncio.create_task(evaluations.wait_for(9))
        task = await take(run)
        assert task is not None
        assert not waiting.done()
        await tell(run, task)
        assert await asyncio.wait_for(waiting, 30) == ""
        assert written == [make_report(9)]
        assert await evaluations.wait_for(9) == ""


async def test_a_run_that_does_not_wait_for_its_last_evaluation_warns_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(evaluating(tmp_path, every_steps=1)) as (evaluations, run, written):
        evaluations.request(8)
        task = await take(run)
        assert task is not None
        await tell(run, task)
        evaluations.warn_of_unfinished()
        assert written == [make_report(8)]
        assert not caplog.records
        evaluations.request(9)
        evaluations.warn_of_unfinished()
    assert written == [make_report(8)]
    assert "the run ends before the evaluation of version 9 is done: set evaluation.at_end" in caplog.text


async def test_the_end_does_not_wait_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with desk(evaluating(tmp_path, at_end=True, end_timeout_seconds=0.2)) as (evaluations, _, _):
        evaluations.request(9)
        said = await asyncio.wait_for(evaluations.wait_for(9), 30)
    assert "the evaluation of version 9 was not finished within evaluation.end_timeout_seconds = 0.2" in said
    assert "was not finished within evaluation.end_timeout_seconds = 0.2; the evaluator's log" in caplog.text


async def test_the_end_names_an_evaluator_that_was_not_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = evaluating(tmp_path, at_end=True, end_timeout_seconds=0.5)
    async with managed(config) as run:
        evaluations = EvaluationRequests(config, pool=run.manager, write=lambda report: None)
        evaluations.request(9)
        waiting = asyncio.create_task(evaluations.wait_for(9))
        await asyncio.sleep(0.2)
        assert f"waits up to 0.5 s for the evaluation of version 9: {NO_EVALUATOR}" in caplog.text
        reason = await asyncio.wait_for(waiting, 30)
        assert reason.endswith("within evaluation.end_timeout_seconds = 0.5: no evaluator has joined the run")
        evaluations.warn_of_unfinished()
    assert f"the run ends before the evaluation of version 9 is done: {NO_EVALUATOR}" in caplog.text


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
        assert (await take(run) is not None) == due
