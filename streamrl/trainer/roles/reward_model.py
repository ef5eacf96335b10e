"""A neural reward model: one score for each response, read at its last token (`rew_inf`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from streamrl.config import TrainerConfig
from streamrl.trainer.backends.base import ParallelModel
from streamrl.trainer.roles.items import infer_packed
from streamrl.types import TrajectoryGroup


class RewardModel:
    """A model with a scalar head that is never trained here."""

    def __init__(self, model: ParallelModel, *, trainer: TrainerConfig) -> None:
        self.model = model
        self._trainer = trainer

    def inference(self, groups: Sequence[TrajectoryGroup]) -> list[NDArray[np.float32]] | None:
        """`[siblings]` scores of each group; None where the model gives no output. Collective."""
        packed = infer_packed(self.model, groups, self._trainer, positions="ends")
        if packed is None:
            return None
        return [values[np.cumsum(group.seqlens) - 1] for values, group in zip(packed, groups, strict=True)]
