"""A model worker of `bench_weights.py --senders`: it has all weights, as with data parallelism, and sends a part."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.device import resolve_dtype
from streamrl.safetensors_files import TensorFiles
from streamrl.trainer.backends.base import dealt, spread
from streamrl.trainer.worker.weight_source import WeightSource
from streamrl.transport.collective import Broadcaster, join_world

CPU = torch.device("cpu")
TIMEOUT_SECONDS = 300.0


class Replica:
    """What a data-parallel rank of a model is to `WeightSource`."""

    def __init__(self, tensors: dict[str, Tensor], *, rank: int, world: int) -> None:
        self._tensors = tensors
        self._rank = rank
        self._world = world

    def weight_specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def weight_senders(self, *, most: int) -> list[int]:
        sizes = [math.prod(shape) for _, shape in self.weight_specs()]
        return dealt(sizes, [spread(range(self._world), most)] * len(sizes))

    def gather_weights(
        self, *, dtype: torch.dtype | None = None, to: Sequence[int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for (name, tensor), target in zip(self._tensors.items(), to or [0] * len(self._tensors), strict=True):
            yield name, tensor if target == self._rank else tensor.new_empty(0)


def read_weights(folder: Path) -> dict[str, Tensor]:
    files = TensorFiles(folder, "model")
    return {name: files.read(name).float() for name in files.names()}


def source_of(config: Config, tensors: dict[str, Tensor], *, rank: int, world: int) -> WeightSource:
    """Collective."""
    dtype = resolve_dtype(config.gserver.dtype, CPU)
    return WeightSource(
        Replica(tensors, rank=rank, world=world),
        rank=rank,
        world=world,
        timeout_seconds=TIMEOUT_SECONDS,
        dtype=dtype,
        own=Broadcaster(config.weights, backend="gloo", dtype=dtype, device=CPU),
        most_senders=world,
    )


def main() -> None:
    file, folder, rank, world, port = sys.argv[1:]
    torch.set_num_threads(1)
    join_world(
        address="127.0.0.1",
        port=int(port),
        rank=int(rank),
        world_size=int(world),
        backend="gloo",
        timeout=TIMEOUT_SECONDS,
    )
    source = source_of(configuration.load(file), read_weights(Path(folder)), rank=int(rank), world=int(world))
    while True:  # it is killed in the end
        source.serve()


if __name__ == "__main__":
    main()
