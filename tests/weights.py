"""Weights to publish that are there, without a model that trains or other ranks, and their publisher."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from streamrl.config import Config
from streamrl.trainer.worker.publisher import Publisher, carriers_for
from streamrl.trainer.worker.weight_source import WeightSource
from streamrl.transport.addresses import LOOPBACK
from streamrl.transport.manager_client import ControlClient


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


def cpu_publisher(config: Config, client: ControlClient) -> Publisher:
    """A publisher of weights in float32 from this machine's memory, over gloo if they are broadcast."""
    carriers = carriers_for(
        config, reach=LOOPBACK, backend="gloo", dtype=torch.float32, device=torch.device("cpu"), numbers=0
    )
    return Publisher(client=client, config=config, carriers=carriers, in_thread=asyncio.to_thread)
