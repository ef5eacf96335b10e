"""The rules by which a training batch is formed and cut: `ledger.select_batch` under a run's settings. Pure.

Master, replay and planner share these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from streamrl.config import Config
from streamrl.ledger import ReadyGroups, Selection, count_over_age, select_batch
from streamrl.types import SampleMeta


class BatchFormer:
    """Selects training batches, and cuts them into minibatches."""

    def __init__(self, config: Config) -> None:
        self.group_size = config.rollout.group_size
        self._groups = config.trainer.batch_groups
        self._minibatches = config.algorithm.minibatches
        self.max_staleness = config.staleness.max_staleness
        self.over_age = config.staleness.over_age

    def select(
        self, ready: ReadyGroups, *, policy_version: int, next_in_order: Callable[[int], list[int]]
    ) -> Selection:
        """Return the next batch at `policy_version`.

        `next_in_order(count)` returns the first `count` sequence numbers that are neither trained on nor given up; used
        by `over_age = "wait"`.
        """
        return select_batch(
            ready,
            policy_version=policy_version,
            groups_per_batch=self._groups,
            max_staleness=self.max_staleness,
            over_age=self.over_age,
            next_in_order=next_in_order(self._groups) if self.over_age == "wait" else (),
        )

    def describe(self, selection: Selection, *, policy_version: int) -> str:
        """Return what the selection lacks."""
        lacking = f"{selection.short} of {self._groups} groups for actor_train v{policy_version}"
        return f"{lacking}, oldest seq {selection.missing[0]}" if selection.missing else lacking

    def minibatches(self, batch: Sequence[SampleMeta]) -> list[Sequence[SampleMeta]]:
        """Return the batch cut into minibatches, in order."""
        cuts = [round(i * len(batch) / self._minibatches) for i in range(self._minibatches + 1)]
        return [batch[a:b] for a, b in pairwise(cuts)]

    def tokens_in_loss(self, meta: SampleMeta, *, policy_version: int) -> int:
        """Return how many tokens of a group enter the loss at `policy_version`."""
        over_age = count_over_age(meta.version_counts, policy_version=policy_version, max_staleness=self.max_staleness)
        return meta.sampled_tokens - over_age
