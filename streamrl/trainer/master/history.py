"""The run's history, and the events that are due: its end, a checkpoint, an evaluation. Pure: counts and times are
passed in.

`History` has the facts about past steps that the run's end, its figures and its checkpoints depend on. The ledger has
the trained and the rejected groups; `RunControl` calls both *consumed*. An epoch ends when as many groups as the data
set has rows were consumed since the last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from streamrl.config import Config
from streamrl.config.fields import every
from streamrl.ledger import Ledger
from streamrl.records import progress
from streamrl.records.collapse import CollapseWatch
from streamrl.records.lineage import FIRST, Lineage
from streamrl.transport.control import DataFacts

# --- events that are due ---


STOP_WINDOW = 5
"""Number of steps over which the reward is averaged for `run.stop_at_reward`."""


class RunControl:
    """Decides when the run ends, and when a checkpoint or an evaluation is due."""

    def __init__(self, config: Config, *, data_rows: int, step: int, consumed: int, now: float) -> None:
        """`data_rows`: rows of the training data. `step`, `consumed`: at the beginning, larger than 0 for a resumed
        run. `now`: seconds on the clock of all later calls."""
        self._run = config.run
        self.data_rows = data_rows
        epoch = consumed // data_rows
        self._saves = every(config.trainer.save_every).since(epoch=epoch, step=step, now=now)
        self._evaluations = every(config.evaluation.every).since(epoch=epoch, step=step, now=now)

    def epochs(self, consumed: int) -> float:
        """Return the number of passes over the data set."""
        return consumed / self.data_rows

    def end(self, *, step: int, consumed: int, rewards: Sequence[float]) -> str | None:
        """Return why the run is over after `step` steps, if it is; `rewards`: mean of each step so far."""
        run = self._run
        if run.stop_at_reward is not None and len(rewards) >= STOP_WINDOW:
            recent = sum(rewards[-STOP_WINDOW:]) / STOP_WINDOW
            if recent >= run.stop_at_reward:
                return f"the mean reward reached {recent:.3f} after {step} steps"
        if run.most_steps is not None and step >= run.most_steps:
            return f"{run.most_steps} steps are done"
        if run.total_train_epochs is not None and consumed // self.data_rows >= run.total_train_epochs:
            return f"{run.total_train_epochs} epochs are done after {step} steps"
        return None

    def due(self, *, step: int, consumed: int, now: float) -> tuple[bool, bool]:
        """Return whether an evaluation and a checkpoint are due; call this once after each step."""
        epoch = consumed // self.data_rows
        evaluate = self._evaluations.due(epoch=epoch, step=step, now=now)
        return evaluate, self._saves.due(epoch=epoch, step=step, now=now)


SNAPSHOT_SHARE = 0.01
"""Largest share of a run's time in which training pauses for snapshots by default. A thread then writes the copy, which
costs about as much again where the trainer computes on the CPU."""


class SnapshotPace:
    """Decides when snapshots are due: as configured, or as often as they cost `SNAPSHOT_SHARE` of the time."""

    def __init__(self, every: int | None, *, step: int) -> None:
        """`every`: `trainer.snapshot_every_steps`; `step`: step at the beginning of the run."""
        self._every = every
        self._next = step + (every or 1)

    def due(self, step: int) -> bool:
        """Whether a snapshot is due after `step`."""
        return self._every != 0 and step >= self._next

    def taken(self, step: int, *, seconds: float, step_seconds: float) -> None:
        """Record that the snapshot after `step` took `seconds`, and the step itself `step_seconds`."""
        self._next = step + (self._every or max(1, math.ceil(seconds / (SNAPSHOT_SHARE * step_seconds))))


# --- past steps ---


class History:
    """The past of the run: empty, or restored from the checkpoint that it continues from."""

    def __init__(self, config: Config, begun: progress.Progress | None, *, lineage: Lineage = FIRST) -> None:
        """`begun`: progress of the checkpoint of a resumed run. `lineage`: lineage of the new versions."""
        self._config = config
        self._lineage = lineage
        self.policy_version = 0
        """The newest trained version, that is, the number of completed training steps. The ledger has the version that
        gservers serve, which follows with the publication."""
        self.tokens_dropped = 0
        self.evaluation_due = False
        """Whether an evaluation of this version was due."""
        self.rewards: list[float] = []
        """Mean reward of each step, for a resumed run also of the last ones before the checkpoint."""
        self.watch = CollapseWatch(near=0 if config.staleness.most_drift else None)
        """The run's health by the figures of the steps so far."""
        self._began = time.time()
        self._seconds_before = 0.0
        if begun is not None:
            self._restore(begun)

    @property
    def train_seconds(self) -> float:
        """Seconds since the first step, without the time between a run's end and its resumption."""
        return self._seconds_before + time.time() - self._began

    def begin(self) -> None:
        """Start the clock, once the models are loaded."""
        self._began = time.time()

    def reached(self, ledger: Ledger, *, data: DataFacts) -> progress.Progress:
        """Return the progress of the run for a checkpoint."""
        return progress.Progress(
            policy_version=self.policy_version,
            lineage=self._lineage.maker(self.policy_version),
            trained=ledger.trained_seqs.ranges(),
            rejected=ledger.rejected.ranges(),
            prompts=progress.prompts_digest(self._config),
            data_rows=data.rows,
            data_digest=data.digest,
            data_of_tasks=data.of_tasks,
            reached_at=time.time(),
            train_seconds=self.train_seconds,
            tokens_dropped=self.tokens_dropped,
            evaluation_due=self.evaluation_due,
            recent_rewards=self.rewards[-STOP_WINDOW:],
            watch=self.watch,
            rows=ledger.rows.state(),
        )

    def _restore(self, begun: progress.Progress) -> None:
        self.policy_version = begun.policy_version
        self.tokens_dropped = begun.tokens_dropped
        self.evaluation_due = begun.evaluation_due
        self.rewards = list(begun.recent_rewards)
        self.watch = begun.watch.resumed(most_drift=self._config.staleness.most_drift)
        self._seconds_before = begun.train_seconds
