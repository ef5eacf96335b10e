"""The manager's calls about evaluations, over real HTTP; their queue, under any order of its calls."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.config import Config
from streamrl.errors import PeerError
from streamrl.gserver.manager.evaluations import EvaluationQueue
from streamrl.transport import manager_client
from streamrl.transport.control import (
    NO_EVALUATOR,
    Admit,
    EvaluationResult,
    EvaluationRoute,
    EvaluationTask,
    NextEvaluation,
)
from tests.evaluations import make_report
from tests.gserver.harness import Run, managed, small_config
from tests.gserver.scripted import scripted

QUIET = 0.1
"""Seconds in which a call that has to wait must not return."""
NEXT = NextEvaluation(evaluator=0)


def evaluating(folder: Path, **sections: dict[str, Any]) -> Config:
    return small_config(folder, **({"evaluation": {"every_steps": 1}} | sections))


async def ask(run: Run, version: int) -> None:
    run.manager.evaluate(version, training_over=False)


async def take(run: Run) -> EvaluationTask:
    task = (await asyncio.wait_for(run.client.next_evaluation(NEXT), 30)).task
    assert task is not None
    return task


async def tell(run: Run, task: EvaluationTask) -> None:
    report = make_report(task.policy_version)
    await run.client.evaluation_result(EvaluationResult(evaluator=0, task=task.id, report=report))


async def still_waits(task: asyncio.Task[Any]) -> None:
    done, _ = await asyncio.wait({task}, timeout=QUIET)
    assert not done


async def load(run: Run, index: int) -> int:
    return int((await run.process("gserver", index)).stats["groups_in_flight"])


async def test_an_evaluation_goes_from_the_master_to_the_evaluator_and_back(tmp_path: Path) -> None:
    async with managed(evaluating(tmp_path)) as run:
        await run.register("evaluator")
        waiting = asyncio.create_task(run.client.next_evaluation(NEXT))
        await still_waits(waiting)
        await ask(run, 3)
        task = (await asyncio.wait_for(waiting, 30)).task
        assert task is not None
        assert (task.policy_version, task.step) == (3, 3)
        await ask(run, 4)
        await ask(run, 5)
        status = (await run.client.status()).evaluation
        assert status is not None
        assert (status.running, status.left_out, status.last) == (task, 1, None)
        assert await take(run) == task  # whoever asks again has lost it
        assert run.reports == []
        await tell(run, task)
        assert run.reports == [make_report(3)]
        await tell(run, task)  # the answer was lost: told again, counted once
        assert (await take(run)).policy_version == 5
        status = (await run.client.status()).evaluation
        assert status is not None
        assert (status.done, status.last) == (1, make_report(3))
        assert run.reports == [make_report(3)]
        async with aiohttp.ClientSession() as session, session.get(f"{run.url}/metrics") as response:
            text = await response.text()
        assert "streamrl_evaluations_total 1.0" in text
        assert "streamrl_evaluations_left_out_total 1.0" in text
        assert 'streamrl_evaluation_metric{metric="pass@4"} 0.6' in text


async def test_prompts_go_to_the_least_loaded_gserver_and_are_no_groups_of_the_ledger(tmp_path: Path) -> None:
    async with managed(evaluating(tmp_path, gserver={"count": 2})) as run, scripted(2) as gservers:
        for index, gserver in enumerate(gservers):
            await run.register("gserver", index, address=gserver.url)
        await run.register("rollout")
        await run.register("evaluator")
        await run.until_live(0, 1)

        async def route(prompt: int, *, failed: str = "", done: tuple[int, ...] = ()) -> int:
            message = EvaluationRoute(evaluator=0, prompt=prompt, failed=failed, done=list(done))
            found = (await run.client.evaluation_route(message)).gserver
            return [gserver.url for gserver in gservers].index(found)

        assert [await route(prompt) for prompt in range(4)] == [0, 1, 0, 1]
        assert [admission.gserver for admission in await run.admit(2)] == [gservers[0].url, gservers[1].url]
        assert (await load(run, 0), await load(run, 1)) == (3, 3)
        assert await route(4, done=(0, 2)) == 0
        assert (await load(run, 0), await load(run, 1)) == (2, 3)
        assert await route(4, failed=gservers[0].url) == 1
        assert (await load(run, 0), await load(run, 1)) == (1, 4)
        ledger = (await run.client.status()).ledger
        assert (ledger.next_seq, ledger.running, ledger.room) == (2, 2, 2)
        await ask(run, 0)
        await tell(run, await take(run))
        assert (await load(run, 0), await load(run, 1)) == (1, 1)


async def test_the_evaluation_of_an_evaluator_that_was_replaced_is_made_anew(tmp_path: Path) -> None:
    async with managed(evaluating(tmp_path)) as run, scripted() as (gserver,):
        await run.register("gserver", address=gserver.url)
        await run.register("evaluator", pid=1)
        await run.until_live(0)
        await ask(run, 7)
        task = await take(run)
        await run.client.evaluation_route(EvaluationRoute(evaluator=0, prompt=0))
        assert await load(run, 0) == 1
        await run.register("evaluator", pid=2)
        assert await load(run, 0) == 0
        assert await take(run) == task


async def test_a_silent_evaluator_loses_its_evaluation_but_its_late_report_counts(tmp_path: Path) -> None:
    async with managed(evaluating(tmp_path, manager={"lease_seconds": 0.3})) as run:
        await run.register("evaluator")
        await ask(run, 7)
        task = await take(run)
        await run.until(lambda status: status.evaluation is not None and status.evaluation.waiting == task)
        await tell(run, task)
        status = (await run.client.status()).evaluation
        assert status is not None
        assert (status.done, status.running, status.waiting) == (1, None, None)


async def test_a_report_of_what_an_earlier_manager_asked_for_does_not_count(
    tmp_path: Path,
) -> None:
    async with managed(evaluating(tmp_path)) as earlier:
        await earlier.register("evaluator")
        await ask(earlier, 3)
        old = await take(earlier)
    async with managed(evaluating(tmp_path)) as run:
        await run.register("evaluator")
        await ask(run, 9)
        await tell(run, old)
        task = await take(run)
        assert task.policy_version == 9
        await tell(run, old)
        status = (await run.client.status()).evaluation
        assert status is not None
        assert (status.running, status.done) == (task, 0)


async def test_the_end_of_the_run_is_told_to_everyone_who_waits(tmp_path: Path) -> None:
    async with managed(evaluating(tmp_path)) as run:
        await run.register("evaluator")
        waiting = asyncio.create_task(run.client.next_evaluation(NEXT))
        await still_waits(waiting)
        run.manager.finish("done", stopped=False)
        assert (await asyncio.wait_for(waiting, 30)).stop
        assert (await run.client.evaluation_route(EvaluationRoute(evaluator=0, prompt=0))).gserver == ""


async def test_once_training_is_over_no_group_is_started_any_more(tmp_path: Path) -> None:
    async with managed(evaluating(tmp_path)) as run, scripted() as (gserver,):
        await run.register("gserver", address=gserver.url)
        await run.register("rollout")
        await run.register("evaluator")
        await run.until_live(0)
        await ask(run, 4)
        assert await run.admit_seqs(1) == [0]
        run.manager.evaluate(4, training_over=True)
        admission = asyncio.create_task(run.client.admit(Admit(worker=0, count=1)))
        await still_waits(admission)
        await tell(run, await take(run))
        run.manager.evaluate(4, training_over=True)  # the same version again: it was made
        status = (await run.client.status()).evaluation
        assert status is not None
        assert (status.done, status.waiting, status.left_out) == (1, None, 0)
        run.manager.finish("done", stopped=False)
        assert (await asyncio.wait_for(admission, 30)).stop


async def test_strangers_get_nothing_and_a_run_without_evaluation_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_client, "PATIENCE_SECONDS", 0.3)  # they are asked again, since they may register yet
    async with managed(small_config(tmp_path)) as run:
        with pytest.raises(PeerError, match="evaluator/0 is not registered"):
            await run.client.next_evaluation(NEXT)
        status = await run.client.status()
        assert status.evaluation is None
        assert "evaluator" not in status.message


async def test_a_run_with_evaluation_waits_for_its_evaluator_to_join(tmp_path: Path) -> None:
    async with managed(evaluating(tmp_path)) as run:
        assert "evaluator/0" in (await run.client.status()).message


async def test_without_an_evaluator_the_log_and_the_status_show_how_to_start_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(tmp_path, evaluation={"every_steps": 1}, rollout={"workers": 1}, gserver={"count": 1})
    async with managed(config) as run, scripted() as (gserver,):
        await run.register("gserver", address=gserver.url)
        for role in ("rollout", "model_worker"):
            await run.register(role)
        assert (await run.client.status()).message == f"waits for evaluator/0 to join: {NO_EVALUATOR}"
        for version in (1, 2):
            await ask(run, version)
        assert f"the evaluation of version 1 is left out for that of version 2: {NO_EVALUATOR}" in caplog.text
        await run.register("evaluator")
        await ask(run, 3)
    assert NO_EVALUATOR.startswith("no evaluator has joined the run")
    assert "streamrl evaluator CONFIG --manager URL" in NO_EVALUATOR
    assert "version 2 is left out for that of version 3: it had not begun; evaluate less often" in caplog.text


owners = st.sampled_from(["evaluator/0", "evaluator/1"])


class Evaluating(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = EvaluationQueue(evaluators=lambda: 1)
        self.asked = 0
        self.given: list[tuple[str, EvaluationTask]] = []

    @rule()
    def ask(self) -> None:
        self.queue.ask(self.asked)
        self.asked += 1
        waiting = self.queue.status().waiting
        assert waiting is not None
        assert waiting.policy_version == self.asked - 1  # the latest wins

    @rule(owner=owners)
    def take(self, owner: str) -> None:
        had, has = self.queue.status(), self.queue.has_for(owner)
        task = self.queue.take(owner)
        assert has == (task is not None)
        if task is not None:
            assert task in (had.running, had.waiting)
            self.given.append((owner, task))

    @rule(owner=owners)
    def lose(self, owner: str) -> None:
        self.queue.give_back(owner)
        if self.queue.status().running is not None:
            assert self.queue.take(owner) is None

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        """From anyone who ever had it, also twice, also long after it was lost."""
        _, task = data.draw(st.sampled_from(self.given))
        before = self.queue.status()
        counted = self.queue.done(task.id, make_report(task.policy_version))
        assert counted == (task in (before.running, before.waiting))
        assert not self.queue.done(task.id, make_report(task.policy_version))

    @invariant()
    def every_evaluation_is_in_one_place(self) -> None:
        status = self.queue.status()
        under_way = [task for task in (status.running, status.waiting) if task is not None]
        assert status.done + status.left_out + len(under_way) == self.asked
        reported = [report.policy_version for report in self.queue.reports]
        assert len(set(reported)) == len(reported)
        assert not set(reported) & {task.policy_version for task in under_way}
        assert status.last == (self.queue.reports[-1] if self.queue.reports else None)


TestEvaluating = Evaluating.TestCase


def test_an_evaluation_that_is_left_out_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    queue = EvaluationQueue(evaluators=lambda: 1)
    with caplog.at_level(logging.INFO):
        for version in (1, 2, 3):
            queue.ask(version)
            queue.take("evaluator/0")
    assert "the evaluation of version 2 waits for that of version 1 to end" in caplog.text
    assert "the evaluation of version 2 is left out for that of version 3: it had not begun" in caplog.text
