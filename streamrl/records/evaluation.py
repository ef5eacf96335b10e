"""Results of an evaluation: `EvaluationReport`, a line of `evaluations.jsonl`; its figures, its text, and pass@k."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamrl.records.timeline import FrequentFailure

EVALUATIONS_FILE = "evaluations.jsonl"


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the policy on held-out prompts. Figures are None if all prompts failed."""

    policy_version: int
    """The requested policy version."""
    step: int
    """Number of training steps done when it was scheduled."""
    time: float
    """Time of its end, in seconds since the epoch."""
    seconds: float
    """Its duration."""
    oldest_version: int | None
    """Oldest and newest policy versions that sampled a token: weights change during an evaluation."""
    newest_version: int | None
    prompts: int
    """Prompts whose responses were scored."""
    samples: int
    """Responses to each prompt."""
    rejected: int
    """Prompts that failed: they enter no other figure."""
    reward_mean: float | None
    """Mean over all responses."""
    pass_at: dict[int, float]
    """k → share of prompts that k responses solve, for k from 1 to `samples`; empty if all prompts failed."""
    response_length_mean: float | None
    """In tokens."""
    cut_share: float | None
    """Responses that reached the limit of tokens, as a share."""
    failure: FrequentFailure | None = None
    """The most frequent error of the prompts that failed; None: none did."""
    tasks: dict[str, EvaluationReport] = {}
    """The same for the prompts of each of [[tasks]]."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return an unbiased estimate of the probability that one of k responses passes, when `passed` of `samples` did.

    1 - C(n-c, k) / C(n, k) of https://arxiv.org/abs/2107.03374 (eq. 1): the share of the ways to choose k of
    the responses that hold at least one that passed. The quotient is computed as a product, so that
    no factorial overflows. Raises `ValueError` unless 0 ≤ passed ≤ samples and 1 ≤ k ≤ samples.
    """
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {passed} in {samples} responses: 0 <= passed <= samples and 1 <= k <= samples")
    all_fail = 1.0
    for chosen in range(k):
        all_fail *= max(0, samples - passed - chosen) / (samples - chosen)
    return 1.0 - all_fail


def mean_pass_at(passed: Sequence[int], *, samples: int) -> dict[int, float]:
    """Return for each k from 1 to `samples` the mean of `pass_at_k` over prompts.

    `passed[i]` of the `samples` responses to prompt i passed.
    """
    if not passed:
        return {}
    return {k: sum(pass_at_k(samples, count, k) for count in passed) / len(passed) for k in range(1, samples + 1)}


def scalars(report: EvaluationReport) -> dict[str, float]:
    """Return the figures of `report` by name, for plots and counters; those that it lacks are left out."""
    named = {
        "reward_mean": report.reward_mean,
        "response_length_mean": report.response_length_mean,
        "cut_share": report.cut_share,
        "seconds": report.seconds,
        "prompts": float(report.prompts),
        "rejected": float(report.rejected),
    }
    known = {name: value for name, value in named.items() if value is not None}
    known |= {f"pass@{k}": share for k, share in report.pass_at.items()}
    for task, own in report.tasks.items():
        known |= {f"task/{task}/{name}": value for name, value in scalars(own).items() if name != "seconds"}
    return known


def in_words(report: EvaluationReport) -> str:
    """Return one line for people: policy versions that responded, reward, pass@1 and pass@k, length, time, failures."""
    answered = f"v{report.oldest_version}"
    if report.newest_version != report.oldest_version:
        answered += f" to v{report.newest_version}"
    parts = [f"evaluation of v{report.policy_version}"]
    if report.reward_mean is None:
        parts.append("no prompt has a response")
    else:
        parts += [
            f"reward {report.reward_mean:.3f}",
            *pass_figures(report),
            f"length {report.response_length_mean:.1f}",
        ]
        parts.append(f"{report.prompts} prompts by {answered}")
    parts += [f"{name} {own.reward_mean:.3f}" for name, own in report.tasks.items() if own.reward_mean is not None]
    parts.append(f"{report.seconds:.1f} s")
    if report.rejected:
        parts.append(f"{report.rejected} rejected")
    return "  ".join(parts)


def pass_figures(report: EvaluationReport) -> list[str]:
    """Return `pass@1 0.250` and, with several samples, the same for k = `samples`."""
    return [f"pass@{k} {report.pass_at[k]:.3f}" for k in sorted({1, report.samples}) if k in report.pass_at]
