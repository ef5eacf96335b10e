"""Weights to publish that are there, without a model that trains or other ranks."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from torch import Tensor

from streamrl.trainer.worker.weight_source import WeightSource


class FixedWeights(WeightSource):
    """A `WeightSource` of `tensors`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def weights(self) -> Generator[tuple[str, Tensor]]:
        yield from self._tensors.items()

    def end(self) -> None:
        """Nobody else has a part of them."""
