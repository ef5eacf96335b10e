"""The evaluator: tries the policy on held-out prompts through the gservers, while training goes on.

Owns its reward processes and its connections. It takes one evaluation after another from the manager, has a
gserver named for each prompt, and reports what it found. Invariants: no more than `evaluation.max_concurrent`
prompts are under way; what goes wrong with one prompt rejects that prompt and nothing else; no group of it
reaches the ledger or the trainer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from streamrl.config import Config
from streamrl.errors import ConfigError, StreamRLError
from streamrl.evaluation import EvaluationReport, in_words
from streamrl.evaluation_config import as_evaluated
from streamrl.rollout.activity import Activity
from streamrl.rollout.groups import GroupMaker
from streamrl.rollout.process import Seat, open_group_maker, serve_until_over
from streamrl.rollout.tally import Tally
from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.evaluations import (
    EvaluationResult,
    EvaluationRoute,
    EvaluationTask,
    NextEvaluation,
)

log = logging.getLogger(__name__)

ASK_SECONDS = 1.0
"""Between questions for a gserver while there is none."""


async def serve(config: Config, *, manager_url: str, index: int = 0, model_dir: Path) -> None:
    """Evaluate whenever the manager says so, until the run is over or the task is cancelled."""

    if not config.evaluation.enabled:
        raise ConfigError("[evaluation] does not say when to evaluate; set for example evaluation.every_steps")

    async def work(seat: Seat) -> None:
        seen = as_evaluated(config)
        maker, prompts = await open_group_maker(seen, seat=seat, model_dir=model_dir)
        wanted = config.evaluation.prompts
        count = len(prompts) if wanted is None else min(wanted, len(prompts))
        log.info("%s has %d held-out prompts", seat.membership.name, count)
        await Evaluator(config, seat=seat, maker=maker, prompts=count).run()

    await serve_until_over(
        config,
        role="evaluator",
        index=index,
        manager_url=manager_url,
        activity=Activity(idle="the next evaluation"),
        work=work,
    )


class Evaluator:
    """Carries evaluations out, each on the first `prompts` held-out prompts."""

    def __init__(self, config: Config, *, seat: Seat, maker: GroupMaker, prompts: int) -> None:
        self._config = config.evaluation
        self._control = seat.control
        self._membership = seat.membership
        self._activity = seat.activity
        self._maker = maker
        self._prompts = prompts
        seat.activity.on_wait(self._show_wait)

    async def run(self) -> None:
        """Until the manager says stop."""
        while True:
            reply = await self._control.next_evaluation(NextEvaluation(evaluator=self._membership.index))
            if reply.stop:
                log.info("%s: the run is over", self._membership.name)
                return
            if reply.task is not None:
                report = await self._evaluate(reply.task)
                await self._tell(reply.task, report)

    async def _evaluate(self, task: EvaluationTask) -> EvaluationReport:
        log.info("evaluation of version %d: %d prompts", task.policy_version, self._prompts)
        began = time.monotonic()
        tally = Tally(samples=self._config.samples, pass_reward=self._config.pass_reward)
        desk = _Routes(self._control, evaluator=self._membership.index)
        numbers = iter(range(self._prompts))
        async with asyncio.TaskGroup() as lanes:
            for lane in range(min(self._config.max_concurrent, self._prompts)):
                lanes.create_task(self._answer_in_turn(numbers, desk, tally), name=f"evaluation, lane {lane}")
        report = tally.report(task, time=time.time(), seconds=time.monotonic() - began)
        log.info("%s", in_words(report))
        return report

    async def _answer_in_turn(self, numbers: Iterator[int], desk: _Routes, tally: Tally) -> None:
        """Answer one prompt after another of those that the lanes share."""
        for number in numbers:
            try:
                with self._activity.group():
                    group = await self._maker.make(number, await desk.route(number))
            except Exception as error:  # one prompt may fail, for example in the user's reward function
                if not isinstance(error, StreamRLError):
                    log.exception("prompt %d of the evaluation failed", number)
                self._activity.rejected(number, error, what="held-out prompt")
                tally.reject()
            else:
                self._activity.done(mean_reward=float(group.rewards.mean()))
                tally.add(group)
            finally:
                desk.left(number)

    async def _tell(self, task: EvaluationTask, report: EvaluationReport) -> None:
        """The manager counts a report that comes twice once."""
        message = EvaluationResult(evaluator=self._membership.index, number=task.number, report=report)
        await self._control.evaluation_result(message)

    def _show_wait(self, waiting_for: str) -> None:
        self._membership.waiting_for = waiting_for


class _Routes:
    """Asks the manager for gservers, and tells it on the way which prompts have ended."""

    def __init__(self, control: ControlClient, *, evaluator: int) -> None:
        self._control = control
        self._evaluator = evaluator
        self._done: list[int] = []

    async def route(self, prompt: int) -> PromptRoute:
        """A route to a gserver, once there is one."""
        while not (found := await self.ask(prompt, failed="")):
            log.warning("prompt %d of the evaluation waits for a gserver", prompt)
            await asyncio.sleep(ASK_SECONDS)  # a manager whose run is over answers at once
        return PromptRoute(self, prompt=prompt, gserver=found)

    def left(self, prompt: int) -> None:
        """`prompt` has ended."""
        self._done.append(prompt)

    async def ask(self, prompt: int, *, failed: str) -> str:
        """URL of a gserver; empty if there is none now."""
        done, self._done = self._done, []
        message = EvaluationRoute(evaluator=self._evaluator, prompt=prompt, failed=failed, done=done)
        return (await self._control.evaluation_route(message)).gserver


class PromptRoute:
    """The gserver of one prompt, shared by its samples."""

    def __init__(self, routes: _Routes, *, prompt: int, gserver: str) -> None:
        self.gserver = gserver
        self._routes = routes
        self._prompt = prompt
        self._asking = asyncio.Lock()

    def request(self, tokens: int) -> AbstractContextManager[None]:
        return nullcontext()  # a prompt keeps its place on the gserver until its last sample is done

    async def replace(self, failed: str) -> None:
        async with self._asking:
            if self.gserver == failed:  # no sample has asked before
                self.gserver = await self._routes.ask(self._prompt, failed=failed) or failed
