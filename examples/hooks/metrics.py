"""Own figures of each training step: the best response of a group, and the share of groups without any success.

Try it:

    streamrl run examples/copy_scratch.toml metrics.hook=examples.hooks.metrics:best_of_group
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from streamrl.records.metrics import StepReport
from streamrl.types import SampleMeta


def best_of_group(report: StepReport, batch: Sequence[SampleMeta]) -> dict[str, float]:
    """Return figures by name; `report` has streamrl's own, `batch` the groups of the step."""
    best = [max(group.rewards) for group in batch]
    return {"own/best_reward": fmean(best), "own/unsolved_share": fmean(reward <= 0 for reward in best)}
