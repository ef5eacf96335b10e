"""The queue of evaluations under any order of asking, taking, losing and reporting."""

from __future__ import annotations

import logging

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamrl.gserver.evaluation_queue import EvaluationQueue
from streamrl.transport.control.evaluations import Evaluate, EvaluationTask
from tests.evaluations import make_report

owners = st.sampled_from(["evaluator/0", "evaluator/1"])


class Evaluating(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = EvaluationQueue()
        self.asked = 0
        self.given: list[tuple[str, EvaluationTask]] = []

    @rule()
    def ask(self) -> None:
        self.queue.ask(Evaluate(policy_version=self.asked, step=self.asked))
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
        counted = self.queue.done(task.number, make_report(task.policy_version))
        assert counted == (task in (before.running, before.waiting))
        assert not self.queue.done(task.number, make_report(task.policy_version))

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


def test_what_is_left_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    queue = EvaluationQueue()
    with caplog.at_level(logging.INFO):
        for version in (1, 2, 3):
            queue.ask(Evaluate(policy_version=version, step=version))
            queue.take("evaluator/0")
    assert "the evaluation of version 2 waits for that of version 1 to end" in caplog.text
    assert "the evaluation of version 2 is left out: it had not begun when that of version 3 was asked" in caplog.text
