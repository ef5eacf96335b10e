"""The interface that a model worker drives, whatever library computes underneath."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from streamrl.types import TrajectoryGroup


class TrainItem(msgspec.Struct):
    """A group with all that `actor_train` needs; arrays are packed like the group's own."""

    group: TrajectoryGroup
    trainable: NDArray[np.bool_]
    """`[tokens]` sampled and young enough: these enter the loss."""
    age: NDArray[np.int32]
    """`[tokens]` in policy versions, of sampled tokens."""
    fresh: NDArray[np.bool_]
    """`[tokens]` of responses sampled as a whole by the policy at the start of the step: there engine and
    trainer have to agree."""
    proximal_logprobs: NDArray[np.float32] | None
    """None: those of the first forward pass."""
    ref_logprobs: NDArray[np.float32] | None
    """None: no KL term."""


class StepStatistics(msgspec.Struct):
    """Sums over tokens or sequences of this rank, and largest values; combined over ranks."""

    sums: dict[str, float]
    maxima: dict[str, float]


class Backend(Protocol):
    """A policy that trains, and a reference policy that does not."""

    def logprobs(self, groups: Sequence[TrajectoryGroup], *, reference: bool) -> list[NDArray[np.float32]]:
        """Log-probabilities of all sampled tokens (0 elsewhere), packed like each group."""
        ...

    def train(
        self,
        items: Sequence[TrainItem],
        *,
        loss_tokens: int,
        sequences: int,
        before_update: Callable[[], None],
    ) -> StepStatistics:
        """One optimizer step on this rank's share of a minibatch.

        `loss_tokens` and `sequences` count the whole minibatch, over all ranks.
        `before_update` is called when gradients are ready and weights are about to change.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights by Hugging Face name, tied ones once."""
        ...

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint (rank 0 only)."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write, into a folder that exists, what else a run needs to go on as if never interrupted (rank 0 only)."""
        ...

    def load_state(self, folder: Path) -> None:
        """Take over what `save_state` wrote; the weights were those of the same checkpoint from the start."""
        ...
