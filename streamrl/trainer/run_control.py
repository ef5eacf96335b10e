"""When the run ends, when a checkpoint is due, when an evaluation is. Pure: counts and times are passed in.

*Settled* groups are those that were trained on and those that were given up for good; an epoch is over when as
many groups as the data set has rows were settled since the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.config import Config


class RunOver(Exception):
    """Not an error: the run is at its end while a batch is awaited that will never be full."""


class RunControl:
    """Counts from where the run begins, which for a resumed one is in its middle."""

    def __init__(self, config: Config, *, data_rows: int, step: int, settled: int, now: float) -> None:
        """`data_rows`: of the training data. `now`: on the clock of all later calls, in seconds."""
        self._run = config.run
        self.data_rows = data_rows
        epoch = settled // data_rows
        self._saves = config.trainer.save_every.since(epoch=epoch, step=step, now=now)
        self._evaluations = config.evaluation.every.since(epoch=epoch, step=step, now=now)

    def epochs(self, settled: int) -> float:
        """How often the data set was passed through."""
        return settled / self.data_rows

    def end(self, *, step: int, settled: int, rewards: Sequence[float]) -> str | None:
        """Why the run is over after `step` steps, if it is; `rewards`: mean of each step so far."""
        run = self._run
        if run.stop_at_reward is not None and len(rewards) >= run.stop_window:
            recent = sum(rewards[-run.stop_window :]) / run.stop_window
            if recent >= run.stop_at_reward:
                return f"the mean reward reached {recent:.3f} after {step} steps"
        if run.most_steps is not None and step >= run.most_steps:
            return f"{run.most_steps} steps are done"
        if run.total_train_epochs is not None and settled // self.data_rows >= run.total_train_epochs:
            return f"{run.total_train_epochs} epochs are done after {step} steps"
        return None

    def save_is_due(self, *, step: int, settled: int, now: float) -> bool:
        """Ask once after each step."""
        return self._saves.due(epoch=settled // self.data_rows, step=step, now=now)

    def evaluation_is_due(self, *, step: int, settled: int, now: float) -> bool:
        """Ask once after each step."""
        return self._evaluations.due(epoch=settled // self.data_rows, step=step, now=now)
