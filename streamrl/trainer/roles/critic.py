"""The critic and the reward model.

The critic predicts the reward still to come, token by token, for PPO with generalised advantage estimation. A neural
reward model gives one score for each response, read at its last token (`rew_inf`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamrl.config import AlgorithmConfig, CriticConfig, TrainerConfig
from streamrl.device import to_device
from streamrl.trainer.algorithms.losses import KLCoefficient, clipped_value_loss
from streamrl.trainer.backends.base import ModelOutput, ParallelModel, Ranks
from streamrl.trainer.backends.optimizer import updates_file
from streamrl.trainer.packing import MicroBatch
from streamrl.trainer.roles.advantages import Credit, assign_credit
from streamrl.trainer.roles.items import (
    DeviceFigures,
    Minibatch,
    RoleState,
    StepStatistics,
    TrainItem,
    at_targets,
    infer_packed,
    needed,
    optimizer_step,
    pack_for,
)
from streamrl.types import TrajectoryGroup

# --- critic ---


@dataclass(eq=False)
class Critic:
    """A model with a scalar head; its value at a position belongs to the state before the next token."""

    model: ParallelModel
    _: KW_ONLY
    ranks: Ranks
    trainer: TrainerConfig
    critic: CriticConfig
    algorithm: AlgorithmConfig
    kl: KLCoefficient
    device: torch.device

    def inference(self, groups: Sequence[TrajectoryGroup]) -> list[NDArray[np.float32]] | None:
        """Return the values of the states in which the sampled tokens were sampled (0 elsewhere), packed like each
        group; None where the model returns no output. Collective."""
        return infer_packed(self.model, groups, self.trainer)

    def begin_step(self, items: Sequence[TrainItem], *, policy_version: int, given: bool) -> list[Credit]:
        """Return the credit of `items`, as `Actor.begin_step`. Collective."""
        self.kl.begin_step(policy_version)
        return assign_credit(items, self.algorithm, kl_coef=self.kl.value, given=given, add_up=self.ranks.add_up)

    def train_step(
        self,
        items: Sequence[TrainItem],
        credits: Sequence[Credit],
        minibatch: Minibatch,
        statistics: StepStatistics,
        *,
        before_update: Callable[[], None],
    ) -> None:
        """Take one optimizer step towards the returns, on this rank's share of `minibatch`. Collective; arguments as
        for `Actor.train_step`."""
        trained = [item.trainable for item in items]
        groups = [item.group for item in items]
        micros = [micro for micro in pack_for(self.model, groups, self.trainer) if at_targets(micro, trained).any()]

        inputs = [self._inputs(micro, items, credits) for micro in micros] if self.model.gives_output else []
        figures = DeviceFigures()

        def loss(number: int, output: ModelOutput) -> Tensor:
            chosen, returns, before = inputs[number]
            residual = returns - before
            values = output.values.index_select(0, chosen)
            found = clipped_value_loss(values, before, returns, clip=self.critic.value_clip)
            loss = found.loss.sum() / max(minibatch.loss_tokens, 1)
            sums = {
                "loss": loss.detach(),
                "tokens": torch.ones_like(returns).sum(),
                "clipped": found.clipped.sum(),
                "value": before.sum(),
                "return": returns.sum(),
                "return_squares": (returns**2).sum(),
                "residual": residual.sum(),
                "residual_squares": (residual**2).sum(),
            }
            figures.add({f"critic/{name}": value for name, value in sums.items()})
            return loss

        self.model.accumulate(micros, loss)
        update = optimizer_step(self.model, statistics, before_update=before_update)
        figures.read_into(statistics)
        statistics.note_largest(**{"critic/grad_norm": update.grad_norm, "critic/lr": update.lr})

    def state(self) -> RoleState:
        """Return the optimizer's state."""
        return RoleState(self.model.optimizer_parts(), updates_file(self.model.updates))

    def load_state(self, folder: Path) -> None:
        """Load a `state` from `folder`. Collective."""
        self.model.load_state(folder)

    def _inputs(
        self, micro: MicroBatch, items: Sequence[TrainItem], credits: Sequence[Credit]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return for the tokens of a micro-batch that enter the loss: their indices in the output, their returns, and
        their values before the step."""
        keep = np.flatnonzero(at_targets(micro, [item.trainable for item in items]))

        def kept(arrays: Sequence[NDArray[np.float32]]) -> Tensor:
            return to_device(at_targets(micro, arrays)[keep], self.device)

        returns = [needed(credit.returns, "returns").numpy() for credit in credits]
        values = [needed(item.values, "values") for item in items]
        return to_device(keep, self.device), kept(returns), kept(values)


# --- reward model ---


class RewardModel:
    """A model with a scalar head that this run never trains."""

    def __init__(self, model: ParallelModel, *, trainer: TrainerConfig) -> None:
        self.model = model
        self._trainer = trainer

    def inference(self, groups: Sequence[TrajectoryGroup]) -> list[NDArray[np.float32]] | None:
        """Return `[siblings]` scores of each group; None where the model returns no output. Collective."""
        packed = infer_packed(self.model, groups, self._trainer, positions="ends")
        if packed is None:
            return None
        return [values[np.cumsum(group.seqlens) - 1] for values, group in zip(packed, groups, strict=True)]
