"""The policy's weights as the publisher sees them: whole, in order, as often as it wants.

Rank 0 asks; the other ranks of the layout give it their parts. Their answer to each `begin` is a
whole pass over the weights, so an attempt that fails half-way is drained before the next.
"""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.trainer.backends.base import ParallelModel

END, AGAIN = 0, 1


class WeightSource:
    """One for each rank; `close` belongs to nobody: the group ends with the process."""

    def __init__(self, model: ParallelModel, *, world: int, timeout_seconds: float) -> None:
        """Collective. `timeout_seconds`: longest pause between two passes."""
        self._model = model
        self._group = None
        if world > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Hugging Face name and shape of each weight, in the order of `weights`."""
        return self._model.weight_specs()

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """Rank 0: all weights, one after another; closing the iterator early still takes the rest from the others."""
        self._tell(AGAIN)
        found = self._model.gather_weights()
        try:
            for weight in found:  # noqa: UP028 (`yield from` would close `found` together with this iterator)
                yield weight
        finally:
            for _ in found:
                pass

    def end(self) -> None:
        """Rank 0: no more passes for this version."""
        self._tell(END)

    def serve(self) -> None:
        """Other ranks: take part in passes until rank 0 ends them."""
        while self._told() == AGAIN:
            for _ in self._model.gather_weights():
                pass

    def _tell(self, word: int) -> None:
        if self._group is not None:
            dist.broadcast(torch.tensor(word), src=0, group=self._group)

    def _told(self) -> int:
        word = torch.tensor(END)
        dist.broadcast(word, src=0, group=self._group)
        return int(word)
