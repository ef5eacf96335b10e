"""Made-up reports of evaluations."""

from __future__ import annotations

from typing import Any

from streamrl.records.evaluation import EvaluationReport


def make_report(policy_version: int, **fields: Any) -> EvaluationReport:
    """An evaluation of 64 prompts by `policy_version` alone, unless `fields` say otherwise."""
    settings: dict[str, Any] = {
        "step": policy_version,
        "time": 1000.0 + policy_version,
        "seconds": 1.5,
        "oldest_version": policy_version,
        "newest_version": policy_version,
        "prompts": 64,
        "samples": 4,
        "rejected": 0,
        "reward_mean": 0.5,
        "pass_at": {1: 0.25, 2: 0.4, 3: 0.5, 4: 0.6},
        "response_length_mean": 7.5,
        "cut_share": 0.1,
    }
    return EvaluationReport(policy_version=policy_version, **(settings | fields))
