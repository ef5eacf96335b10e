"""What the run has done so far, as far as it has to be known: for the end of the run, its figures, its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from streamrl import progress
from streamrl.collapse import CollapseWatch
from streamrl.config import Config
from streamrl.stream_dataset import SeqSet
from streamrl.types import SampleMeta


class History:
    """Begins empty, or where the checkpoint ends that the run goes on from."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.policy_version = 0
        self.groups_trained = 0
        self.tokens_dropped = 0
        self.rewards: list[float] = []
        """Mean reward of each step; of a resumed run from a little before its beginning."""
        self.watch = CollapseWatch()
        """What is remembered of the figures of the steps so far."""
        self.rejected: set[int] = set()
        """Sequence numbers given up for good."""
        self._trained = SeqSet()
        self._began = time.time()
        self._seconds_before = 0.0
        begun = progress.of_run(config)
        if begun is not None:
            self._go_on(begun)

    @property
    def trained(self) -> list[tuple[int, int]]:
        """Ranges (first, last + 1) of the sequence numbers trained on."""
        return self._trained.ranges()

    @property
    def settled(self) -> int:
        """Groups trained on, or given up for good."""
        return self.groups_trained + len(self.rejected)

    @property
    def train_seconds(self) -> float:
        """Since the first step, without the time between a run's end and its being resumed."""
        return self._seconds_before + time.time() - self._began

    def begin(self) -> None:
        """The models are loaded; time counts from here."""
        self._began = time.time()

    def add_step(self, batch: Sequence[SampleMeta], *, reward: float) -> None:
        """A step on `batch` is done; the policy is a new version."""
        for meta in batch:
            self._trained.add(meta.seq)
        self.policy_version += 1
        self.groups_trained += len(batch)
        self.rewards.append(reward)

    def add_rejected(self, seqs: Iterable[int]) -> None:
        """These will never be trained on."""
        self.rejected.update(seqs)

    def reached(self, *, data_rows: int) -> progress.Progress:
        """For a checkpoint."""
        return progress.Progress(
            policy_version=self.policy_version,
            trained=self.trained,
            rejected=progress.ranges(self.rejected),
            prompts=progress.prompts_digest(self._config),
            data_rows=data_rows,
            train_seconds=self.train_seconds,
            tokens_dropped=self.tokens_dropped,
            recent_rewards=self.rewards[-self._config.run.stop_window :],
            watch=self.watch,
        )

    def _go_on(self, begun: progress.Progress) -> None:
        self.policy_version = begun.policy_version
        self.groups_trained = begun.groups_trained
        self.tokens_dropped = begun.tokens_dropped
        self.rewards = list(begun.recent_rewards)
        self.watch = begun.watch.resumed()
        self.rejected = set(begun.rejected_seqs())
        self._seconds_before = begun.train_seconds
        for seq in begun.trained_seqs():
            self._trained.add(seq)
