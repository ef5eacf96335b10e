"""Evaluations on held-out prompts, between the master that requests them and the evaluator that makes them.

Owns the queue of evaluations and the routes of the prompts under way. Invariants: at most one evaluation is under way
and at most one waits, the latest that was asked for; each is reported at most once. Prompts of an
evaluation are no groups of the ledger; the fleet counts them as load until the evaluator says that they are done, or is
gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from streamrl.gserver.manager.admission import Rerouting
from streamrl.gserver.manager.gserver import Gserver, Route, Work
from streamrl.gserver.manager.members import Members
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.manager.run_state import RunState, Wakeup
from streamrl.records.evaluation import EvaluationReport
from streamrl.transport.control import (
    NO_EVALUATOR,
    Done,
    EvaluationResult,
    EvaluationRoute,
    EvaluationStatus,
    EvaluationTask,
    NextEvaluation,
    NextEvaluationReply,
    RouteReply,
)

log = logging.getLogger(__name__)


class Evaluations:
    """The manager's calls about evaluations."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        samples: int,
        changed: Wakeup,
        rerouting: Rerouting,
        members: Members,
        state: RunState,
        on_training_over: Callable[[], None],
        evaluators: Callable[[], int],
        long_poll_seconds: float,
    ) -> None:
        """`samples`: responses to each prompt. `on_training_over` is called when the master waits for nothing but the
        last evaluation. `evaluators`: how many have joined."""
        self._evaluators = evaluators
        self._queue = EvaluationQueue(evaluators=evaluators)
        self._fleet = fleet
        self._prompt = Work(samples, 0)
        self._changed = changed
        self._rerouting = rerouting
        self._members = members
        self._state = state
        self._on_training_over = on_training_over
        self._long_poll = long_poll_seconds
        self.on_report: Callable[[EvaluationReport], None] = lambda report: None
        """Called with each report, once."""
        self._routes: dict[str, dict[int, Route]] = {}
        """Evaluator → its prompts that have a gserver, each with its route."""

    def request(self, version: int, *, training_over: bool) -> None:
        """Queue an evaluation of `version`, which the gservers serve; at most one of each version is made.

        `training_over`: the run ends after it, so no further group starts.
        """
        if training_over:
            self._on_training_over()
        self._queue.ask(version)
        self._changed.notify()

    async def next(self, message: NextEvaluation) -> NextEvaluationReply:
        """Wait for an evaluation for the evaluator, for a long poll at most."""
        member = self._members.caller("evaluator", message.evaluator)
        await self._changed.until(
            lambda: self._state.over or self._queue.has_for(member.name) or member.silent, timeout=self._long_poll
        )
        if self._state.over:
            self._members.tell_over(member)
            return NextEvaluationReply(task=None, stop=True)
        return NextEvaluationReply(task=None if member.silent else self._queue.take(member.name), stop=False)

    async def route(self, message: EvaluationRoute) -> RouteReply:
        """Free the gservers of prompts that are done, and find one for the prompt that begins, or lost its own."""
        member = self._members.caller("evaluator", message.evaluator)
        self._release(member.name, message.done)
        if self._state.over:
            return RouteReply(gserver="")
        found = await self._rerouting.find(
            lambda avoid: self._assign(member.name, message.prompt, avoid=avoid), failed=message.failed
        )
        return RouteReply(gserver=found)

    async def result(self, message: EvaluationResult) -> Done:
        """Take in what an evaluation found; none of its prompts is under way any more."""
        member = self._members.caller("evaluator", message.evaluator)
        self._release(member.name, list(self._routes.get(member.name, ())))
        if self._queue.done(message.task, message.report):
            self.on_report(message.report)
        self._changed.notify()
        return Done()

    def forget(self) -> None:
        """Forget all evaluations that were asked for: the run has gone back."""
        for evaluator in list(self._routes):
            self._release(evaluator, list(self._routes[evaluator]))
        self._queue = EvaluationQueue(evaluators=self._evaluators)

    def lost(self, evaluator: str) -> None:
        """Take back what `evaluator` had, which fell silent, or whose place another process took."""
        self._release(evaluator, list(self._routes.get(evaluator, ())))
        self._queue.give_back(evaluator)
        self._changed.notify()

    def status(self) -> EvaluationStatus:
        """Return which evaluation is under way, which waits, and what was found last."""
        return self._queue.status()

    def _assign(self, evaluator: str, prompt: int, *, avoid: str) -> Gserver | None:
        """Find a gserver for `prompt`, whether it begins or lost the one that it had."""
        route = self._fleet.assign(self._prompt, now=time.monotonic(), avoid=avoid)
        if route is None:
            return None
        self._release(evaluator, [prompt])
        self._routes.setdefault(evaluator, {})[prompt] = route
        return route.gserver

    def _release(self, evaluator: str, prompts: Iterable[int]) -> None:
        routes = self._routes.get(evaluator, {})
        for prompt in prompts:
            if (route := routes.pop(prompt, None)) is not None:
                self._fleet.release(route)


class EvaluationQueue:
    """Takes evaluations from the master, gives them to an evaluator, and keeps what it reports. Pure."""

    def __init__(self, *, evaluators: Callable[[], int]) -> None:
        """`evaluators`: how many have joined the run."""
        self._evaluators = evaluators
        self.reports: list[EvaluationReport] = []
        """In order of arrival."""
        self._versions: set[int] = set()
        """The policy versions that were asked for."""
        self._left_out = 0
        """How many were not made because a later one was due."""
        self._running: EvaluationTask | None = None
        self._owner = ""
        """The evaluator that has the running one."""
        self._waiting: EvaluationTask | None = None

    def ask(self, version: int) -> None:
        """Queue an evaluation that is due, unless one of the same version was requested before.

        One that still waits gives way to it.
        """
        if version in self._versions:
            return
        self._versions.add(version)
        task = EvaluationTask(version, step=version)
        if self._running is not None:
            log.info(
                "the evaluation of version %d waits for that of version %d to end",
                *(task.policy_version, self._running.policy_version),
            )
        self._wait(task)

    def has_for(self, owner: str) -> bool:
        """Return whether `take` would return a task to `owner`."""
        return self._waiting is not None if self._running is None else self._owner == owner

    def take(self, owner: str) -> EvaluationTask | None:
        """Return the next evaluation, or None if there is none for `owner`.

        An owner that asks while its own evaluation is under way has lost it, and gets it again.
        """
        if self._running is None:
            self._running, self._waiting, self._owner = self._waiting, None, owner
        return self._running if self._owner == owner else None

    def give_back(self, owner: str) -> None:
        """Queue the evaluation of `owner`, which is gone, once more, unless a later one waits already."""
        if self._running is None or self._owner != owner:
            return
        lost, self._running = self._running, None
        log.warning("%s was lost in the evaluation of version %d", owner, lost.policy_version)
        if self._waiting is None:
            self._wait(lost)
        else:
            self._leave_out(lost, self._waiting)

    def done(self, task: str, report: EvaluationReport) -> bool:
        """Take in the report of the evaluation with the id `task`; return False if it was reported or left out before,
        or was another manager's."""
        if self._running is not None and self._running.id == task:
            self._running = None
        elif self._waiting is not None and self._waiting.id == task:
            self._waiting = None  # given back too early: its evaluator had only been silent
        else:
            return False
        self.reports.append(report)
        return True

    def status(self) -> EvaluationStatus:
        """Return where the evaluations are."""
        return EvaluationStatus(
            running=self._running,
            waiting=self._waiting,
            done=len(self.reports),
            left_out=self._left_out,
            last=self.reports[-1] if self.reports else None,
        )

    def _wait(self, task: EvaluationTask) -> None:
        if self._waiting is not None:
            self._leave_out(self._waiting, task)
        self._waiting = task

    def _leave_out(self, task: EvaluationTask, later: EvaluationTask) -> None:
        self._left_out += 1
        late = "it had not begun; evaluate less often, or fewer prompts, or raise evaluation.max_concurrent"
        log.warning(
            "the evaluation of version %d is left out for that of version %d: %s",
            *(task.policy_version, later.policy_version),
            late if self._evaluators() else NO_EVALUATOR,
        )
