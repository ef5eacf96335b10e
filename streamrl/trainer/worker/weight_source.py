"""The policy's weights, spread over the trainer's ranks, as the publisher on rank 0 reads them.

A weight that rank 0 does not hold whole is gathered there first, so each pass over the weights is collective: rank 0
announces a pass and all ranks take part in it. Invariant: a pass that breaks off on rank 0 is drained there, so all
ranks finish every collective of it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.trainer.backends.base import WholeWeights


class Weights(Protocol):
    """All weights of a model, in one order."""

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the Hugging Face name and shape of each weight."""

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """Yield each weight with its name; close the generator if it is not exhausted, because sending failed."""


class WeightSource:
    """One for each rank."""

    def __init__(self, model: WholeWeights, *, world: int, timeout_seconds: float, dtype: torch.dtype) -> None:
        """Collective over the `world` ranks. `timeout_seconds`: the longest time between two announcements. `dtype`:
        number format in which weights travel between ranks."""
        self._model = model
        self._dtype = dtype
        self._group = None
        if world > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    # On rank 0

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the Hugging Face name and shape of each weight, in the order of `weights`."""
        return self._model.weight_specs()

    def weights(self) -> Generator[tuple[str, Tensor]]:
        """Yield all weights. Closing the iterator early still takes the rest from the other ranks."""
        self._announced(another=True)
        yield from _drained(self._model.gather_weights(dtype=self._dtype))

    def end(self) -> None:
        """Release the other ranks: no further pass over this version's weights follows."""
        self._announced(another=False)

    # On the other ranks

    def serve(self) -> None:
        """Take part in the passes that rank 0 announces until it ends the version."""
        while self._announced():
            for _ in self._model.gather_weights(dtype=self._dtype):
                pass

    def _announced(self, *, another: bool = False) -> bool:
        """Return rank 0's `another`: whether a pass follows. Collective."""
        flag = torch.tensor(int(another))
        if self._group is not None:
            dist.broadcast(flag, src=0, group=self._group)
        return bool(flag)


def _drained(weights: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor]]:
    """Yield `weights`; closing the iterator early takes the rest."""
    try:
        for weight in weights:  # noqa: UP028 (`yield from` would close `weights` together with this iterator)
            yield weight
    finally:
        for _ in weights:
            pass
