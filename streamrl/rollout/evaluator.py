"""The evaluator: tries the policy on held-out prompts through the gservers, while training goes on.

Owns its reward processes and its connections. It takes one evaluation after another from the manager, has it name a
gserver for each prompt, and reports what it found. Invariants: no more than `evaluation.max_concurrent` prompts are
under way; what goes wrong with one prompt rejects that prompt and nothing else; no group of it reaches the ledger or
the trainer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np

from streamrl.config import Config
from streamrl.config.sections import as_evaluated
from streamrl.errors import ConfigError, StreamRLError
from streamrl.records.evaluation import EvaluationReport, in_words, mean_pass_at
from streamrl.rollout.activity import Activity
from streamrl.rollout.generation import GroupRoute
from streamrl.rollout.groups import GroupMaker
from streamrl.rollout.process import Joined, open_group_maker, serve_until_over
from streamrl.transport.control import EvaluationResult, EvaluationRoute, EvaluationTask, NextEvaluation
from streamrl.transport.manager_client import ControlClient
from streamrl.types import SampleMeta, TrajectoryGroup

log = logging.getLogger(__name__)

ASK_SECONDS = 1.0
"""Between two questions for a gserver while there is none."""


async def serve(config: Config, *, manager_url: str, index: int = 0, model_dir: Path, advertise: str = "") -> None:
    """Evaluate whenever the manager says so, until the run is over or the task is cancelled.

    `advertise`: the address by which others reach this process; empty: that from which it reaches the manager. Raises
    `ConfigError` when the configuration has no evaluation.
    """
    if not config.evaluation.enabled:
        raise ConfigError("[evaluation] does not say when to evaluate; set for example evaluation.every_steps")

    async def work(joined: Joined) -> None:
        maker, prompts = await open_group_maker(as_evaluated(config), joined=joined, model_dir=model_dir)
        most = config.evaluation.prompts
        count = len(prompts) if most is None else min(most, len(prompts))
        log.info("%s has %d held-out prompts", joined.membership.name, count)
        await Evaluator(config, joined=joined, maker=maker, prompts=count).run()

    await serve_until_over(
        config,
        role="evaluator",
        index=index,
        manager_url=manager_url,
        advertise=advertise,
        activity=Activity(idle="the next evaluation"),
        work=work,
    )


class Evaluator:
    """Carries evaluations out, each on the first `prompts` held-out prompts."""

    def __init__(self, config: Config, *, joined: Joined, maker: GroupMaker, prompts: int) -> None:
        self._config = config.evaluation
        self._control = joined.control
        self._membership = joined.membership
        self._activity = joined.activity
        self._maker = maker
        self._prompts = prompts
        joined.activity.on_wait(self._show_wait)

    async def run(self) -> None:
        """Carry out one evaluation after another until the manager says stop."""
        while True:
            reply = await self._control.next_evaluation(NextEvaluation(evaluator=self._membership.index))
            if reply.stop:
                log.info("%s: the run is over", self._membership.name)
                return
            if reply.task is not None:
                self._membership.note_version(reply.task.policy_version)
                report = await self._evaluate(reply.task)
                # the manager counts a report that comes twice once, and none of what an earlier manager wanted
                await self._control.evaluation_result(
                    EvaluationResult(evaluator=self._membership.index, task=reply.task.id, report=report)
                )

    async def _evaluate(self, task: EvaluationTask) -> EvaluationReport:
        log.info("evaluation of version %d: %d prompts", task.policy_version, self._prompts)
        began = time.monotonic()
        tally = Tally(samples=self._config.samples, pass_reward=self._config.pass_reward)
        routes = _Routes(self._control, evaluator=self._membership.index)
        numbers = iter(range(self._prompts))
        async with asyncio.TaskGroup() as tasks:
            for number in range(min(self._config.max_concurrent, self._prompts)):
                tasks.create_task(self._try_prompts(numbers, routes, tally), name=f"evaluation, task {number}")
        report = tally.report(task, time=time.time(), seconds=time.monotonic() - began)
        log.info("%s", in_words(report))
        return report

    async def _try_prompts(self, numbers: Iterator[int], routes: _Routes, tally: Tally) -> None:
        """Try one prompt after another, taking their `numbers` from an iterator that several tasks share."""
        for number in numbers:
            try:
                with self._activity.group():
                    group = await self._maker.make(number, await routes.begin(number))
            except Exception as error:  # one prompt may fail, for example in the user's reward function
                if not isinstance(error, StreamRLError):
                    log.exception("prompt %d of the evaluation failed", number)
                self._activity.rejected(number, error, what="held-out prompt")
                tally.reject()
            else:
                self._activity.done(mean_reward=group.mean_reward)
                tally.add(group)
            finally:
                routes.end(number)

    def _show_wait(self, waiting_for: str) -> None:
        self._membership.waiting_for = waiting_for


class _Routes:
    """Asks the manager for gservers, and tells it on the way which prompts have ended.

    A prompt keeps its place on the gserver until its last sample is done: its requests are not counted one by one.
    """

    def __init__(self, control: ControlClient, *, evaluator: int) -> None:
        self._control = control
        self._evaluator = evaluator
        self._done: list[int] = []

    async def begin(self, prompt: int) -> GroupRoute:
        """Return the route of `prompt`, once there is a gserver for it."""
        while not (gserver := await self._ask(prompt, failed="")):
            log.warning("prompt %d of the evaluation waits for a gserver", prompt)
            await asyncio.sleep(ASK_SECONDS)  # a manager whose run is over replies at once
        return GroupRoute(gserver, find_another=partial(self._ask, prompt))

    def end(self, prompt: int) -> None:
        """`prompt` is done, or was rejected: its gserver is free of it."""
        self._done.append(prompt)

    async def _ask(self, prompt: int, failed: str) -> str:
        """Return the URL of a gserver for `prompt`; empty if there is none now."""
        done, self._done = self._done, []
        message = EvaluationRoute(evaluator=self._evaluator, prompt=prompt, failed=failed, done=done)
        return (await self._control.evaluation_route(message)).gserver


class Tally:
    """Counts the figures of one evaluation, group by group; rejected prompts are counted and enter no other figure."""

    def __init__(self, *, samples: int, pass_reward: float) -> None:
        """`samples`: responses to each prompt. `pass_reward`: the reward from which on a response counts as a pass."""
        self._samples = samples
        self._pass_reward = np.float32(pass_reward)  # rewards have that precision, too
        self._passed: list[int] = []
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._cut = 0
        self._versions: set[int] = set()
        self._rejected = 0

    def add(self, group: TrajectoryGroup) -> None:
        """Count the responses to one prompt."""
        meta = SampleMeta.of(group, head=0)
        rewards = meta.episode_rewards
        self._passed.append(int((np.array(rewards, np.float32) >= self._pass_reward).sum()))
        self._rewards += rewards
        self._lengths += meta.response_lengths
        self._cut += group.finish_reasons.count("length")
        self._versions.update(meta.version_counts)

    def reject(self) -> None:
        """Count a prompt that failed."""
        self._rejected += 1

    def report(self, task: EvaluationTask, *, time: float, seconds: float) -> EvaluationReport:
        """Return what `task` found; it ended at `time` (seconds since the epoch) and took `seconds`."""
        return EvaluationReport(
            policy_version=task.policy_version,
            step=task.step,
            time=time,
            seconds=seconds,
            oldest_version=min(self._versions, default=None),
            newest_version=max(self._versions, default=None),
            prompts=len(self._passed),
            samples=self._samples,
            rejected=self._rejected,
            reward_mean=fmean(self._rewards) if self._rewards else None,
            pass_at=mean_pass_at(self._passed, samples=self._samples),
            response_length_mean=fmean(self._lengths) if self._lengths else None,
            cut_share=self._cut / len(self._lengths) if self._lengths else None,
        )
