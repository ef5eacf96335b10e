"""The manager's calls about evaluations: asked for by the master, made by the evaluator.

Owns the queue and the routes of the prompts under way. Invariant: prompts of an evaluation are no groups of
the ledger; the fleet counts them as load until the evaluator says that they are done, or is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from streamrl.gserver.evaluation_queue import EvaluationQueue
from streamrl.gserver.load import Work
from streamrl.gserver.registry import Member
from streamrl.gserver.rerouting import Rerouting
from streamrl.gserver.routing import Fleet
from streamrl.gserver.wakeup import Wakeup
from streamrl.transport.control.evaluations import (
    Evaluate,
    EvaluationReports,
    EvaluationResult,
    EvaluationRoute,
    EvaluationStatus,
    NextEvaluation,
    NextEvaluationReply,
)
from streamrl.transport.control.groups import RouteReply
from streamrl.transport.control.members import Done


class Evaluations:
    """`evaluator` finds a registered evaluator by its index and hears it; `over` tells whether the run is.

    `on_told` hears who is told so; `on_training_over` is called when the master waits for nothing else any more.
    `samples`: responses to each prompt.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        samples: int,
        changed: Wakeup,
        rerouting: Rerouting,
        evaluator: Callable[[int], Member],
        on_training_over: Callable[[], None],
        on_told: Callable[[Member], None],
        over: Callable[[], bool],
        long_poll_seconds: float,
    ) -> None:
        self._queue = EvaluationQueue()
        self._fleet = fleet
        self._prompt = Work(samples, 0)
        self._changed = changed
        self._rerouting = rerouting
        self._evaluator = evaluator
        self._on_training_over = on_training_over
        self._on_told = on_told
        self._over = over
        self._long_poll = long_poll_seconds
        self._routed: dict[str, set[int]] = {}

    async def ask(self, message: Evaluate) -> Done:
        if message.training_over:
            self._on_training_over()
        self._queue.ask(message)
        self._changed.notify()
        return Done()

    async def next(self, message: NextEvaluation) -> NextEvaluationReply:
        member = self._evaluator(message.evaluator)
        await self._changed.until(
            lambda: self._over() or self._queue.has_for(member.name) or member.silent, timeout=self._long_poll
        )
        if self._over():
            self._on_told(member)
            return NextEvaluationReply(task=None, stop=True)
        return NextEvaluationReply(task=None if member.silent else self._queue.take(member.name), stop=False)

    async def route(self, message: EvaluationRoute) -> RouteReply:
        member = self._evaluator(message.evaluator)
        self._release(member.name, message.done)
        if self._over():
            return RouteReply(gserver="")
        key = _load(member.name, message.prompt)
        found = await self._rerouting.find(
            lambda avoid: self._fleet.assign(key, self._prompt, now=time.monotonic(), avoid=avoid),
            failed=message.failed,
        )
        if found:
            self._routed.setdefault(member.name, set()).add(message.prompt)
        return RouteReply(gserver=found)

    async def result(self, message: EvaluationResult) -> Done:
        member = self._evaluator(message.evaluator)
        self._release(member.name, list(self._routed.get(member.name, ())))
        self._queue.done(message.number, message.report)
        self._changed.notify()
        return Done()

    async def reports(self, after: int) -> EvaluationReports:
        reports = self._queue.reports
        await self._changed.until(lambda: len(reports) > after or self._over(), timeout=self._long_poll)
        return EvaluationReports(reports=reports[after:], stop=self._over())

    def lost(self, evaluator: str) -> None:
        """`evaluator` fell silent, or another process took its place."""
        self._release(evaluator, list(self._routed.get(evaluator, ())))
        self._queue.give_back(evaluator)
        self._changed.notify()

    def status(self) -> EvaluationStatus:
        return self._queue.status()

    def _release(self, evaluator: str, prompts: list[int]) -> None:
        for prompt in prompts:
            self._fleet.release(_load(evaluator, prompt))
        self._routed.get(evaluator, set()).difference_update(prompts)


def _load(evaluator: str, prompt: int) -> str:
    """Under which name the fleet knows a prompt of an evaluation; groups have numbers."""
    return f"{evaluator}/{prompt}"
