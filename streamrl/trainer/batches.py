"""How the master forms training batches: the ledger's selection over what the buffer holds.

Owns which sequence numbers were trained on and which were rejected, as far as the order
matters. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from streamrl.config import Config
from streamrl.held import HeldGroups
from streamrl.ledger import Selection, count_over_age, next_in_order, select_batch
from streamrl.types import SampleMeta


class BatchFormer:
    """Selects the batch of one policy version after another."""

    def __init__(self, config: Config) -> None:
        self._groups = config.trainer.batch_groups
        self._minibatches = config.algorithm.minibatches
        self.max_staleness = config.staleness.max_staleness
        self.over_age = config.staleness.over_age
        self._trained: set[int] = set()
        self._rejected: set[int] = set()
        self._first_open = 0

    def reject(self, seqs: Iterable[int]) -> None:
        """These will never come."""
        self._rejected.update(seqs)
        self._advance()

    def trained(self, seqs: Iterable[int]) -> None:
        """These have been trained on."""
        self._trained.update(seqs)
        self._advance()

    def select(self, held: HeldGroups, *, policy_version: int) -> Selection:
        """The next batch at `policy_version`."""
        order: list[int] = []
        if self.over_age == "wait":
            order = next_in_order(self._trained, self._rejected, start=self._first_open, count=self._groups)
        return select_batch(
            held,
            policy_version=policy_version,
            groups_per_batch=self._groups,
            max_staleness=self.max_staleness,
            over_age=self.over_age,
            next_in_order=order,
        )

    def describe(self, selection: Selection, *, policy_version: int) -> str:
        """What the selection waits for, in words."""
        waits = f"actor_train v{policy_version} waits for {selection.short} of {self._groups} groups"
        return f"{waits}, oldest seq {selection.missing[0]}" if selection.missing else waits

    def minibatches(self, batch: Sequence[SampleMeta]) -> list[Sequence[SampleMeta]]:
        """The batch cut into minibatches, in order."""
        cuts = [round(i * len(batch) / self._minibatches) for i in range(self._minibatches + 1)]
        return [batch[a:b] for a, b in pairwise(cuts)]

    def young_tokens(self, meta: SampleMeta, *, policy_version: int) -> int:
        """Tokens of a group that enter the loss at `policy_version`."""
        over_age = count_over_age(meta.version_counts, policy_version=policy_version, max_staleness=self.max_staleness)
        return meta.sampled_tokens - over_age

    def _advance(self) -> None:
        while self._first_open in self._trained or self._first_open in self._rejected:
            self._trained.discard(self._first_open)
            self._rejected.discard(self._first_open)
            self._first_open += 1
