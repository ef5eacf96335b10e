"""Evaluations on held-out prompts: asked for by the master, made by the evaluator, told back."""

from __future__ import annotations

import msgspec

from streamrl.evaluation import EvaluationReport


class Evaluate(msgspec.Struct, frozen=True):
    """The policy is to be tried on held-out prompts."""

    policy_version: int
    """Which one, as the gservers have it now."""
    step: int
    """Training steps that are done."""
    training_over: bool = False
    """The run ends after this evaluation: no further group is started."""


class EvaluationTask(msgspec.Struct, frozen=True):
    """An evaluation on its way from the master to an evaluator."""

    number: int
    """Of the evaluation, from 0, as the manager counts."""
    policy_version: int
    step: int


class NextEvaluation(msgspec.Struct, frozen=True):
    evaluator: int


class NextEvaluationReply(msgspec.Struct, frozen=True):
    task: EvaluationTask | None
    """None after a long poll without one."""
    stop: bool


class EvaluationRoute(msgspec.Struct, frozen=True):
    evaluator: int
    prompt: int
    """Number of the prompt within the evaluation."""
    failed: str = ""
    """URL of the gserver that failed; empty when the prompt begins."""
    done: list[int] = []
    """Prompts that have ended since the last call: their gservers are free of them."""


class EvaluationResult(msgspec.Struct, frozen=True):
    evaluator: int
    number: int
    """Of the `EvaluationTask`."""
    report: EvaluationReport


class EvaluationReports(msgspec.Struct, frozen=True):
    reports: list[EvaluationReport]
    """All since the n-th that was asked for."""
    stop: bool
    """The run is over: there will be no more."""


class EvaluationStatus(msgspec.Struct, frozen=True):
    running: EvaluationTask | None
    waiting: EvaluationTask | None
    done: int
    left_out: int
    """Evaluations that were not made because a later one was due."""
    last: EvaluationReport | None
