"""One of two model workers that send weights together."""

from __future__ import annotations

from typing import Any

import torch

from streamrl.config import WeightsConfig
from streamrl.trainer.worker.weight_source import WeightSource
from streamrl.transport.collective import Broadcaster


def one_of_two(
    model: Any,
    config: WeightsConfig,
    *,
    rank: int,
    dtype: torch.dtype,
    timeout_seconds: float,
    most_senders: int = 2,
    in_turn: bool,
    backend: str = "gloo",
    device: torch.device | None = None,
) -> tuple[WeightSource, Broadcaster]:
    """Return the source of `model`'s weights on `rank`, and what sends its part; on the CPU without a `device`."""
    own = Broadcaster(config, backend=backend, dtype=dtype, device=device or torch.device("cpu"), whole_buckets=in_turn)
    source = WeightSource(
        model,
        rank=rank,
        world=2,
        timeout_seconds=timeout_seconds,
        dtype=dtype,
        own=own,
        most_senders=most_senders,
        in_turn=in_turn,
    )
    return source, own
