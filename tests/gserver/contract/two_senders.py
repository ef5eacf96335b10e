"""Two model workers, in processes of their own, that publish a version together."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from streamrl.config import Config

FACTOR = 1.5
"""What the initial weights are multiplied by."""
TIMEOUT_SECONDS = 60.0


class Sending(NamedTuple):
    """What they have to know."""

    config: Config
    manager_url: str
    secret: str
    version: int
    model_dir: Path


def send_a_part(rank: int, port: int, sending: Sending, answers: Any) -> None:
    """One of them; rank 0 answers with the bytes that each has sent."""
    from streamrl.trainer.backends.torch import TorchModel
    from streamrl.trainer.worker.publisher import Carriers, Publisher
    from streamrl.trainer.worker.publisher import sending as way_of
    from streamrl.trainer.worker.weight_source import Senders
    from streamrl.transport.manager_client import ControlClient
    from tests.trainer.backends.reference import make_spec
    from tests.trainer.senders import one_of_two

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    config = msgspec.structs.replace(sending.config, weights=msgspec.structs.replace(sending.config.weights, senders=2))
    senders, in_turn = way_of(config, world=2, backend="gloo")
    model = TorchModel(make_spec(sending.model_dir, shard=True), world=2)
    model.load_weights([(name, weight * FACTOR) for name, weight in model_weights(sending.model_dir)])
    source, _ = one_of_two(
        model,
        config.weights,
        rank=rank,
        dtype=torch.float32,
        timeout_seconds=TIMEOUT_SECONDS,
        most_senders=senders,
        in_turn=in_turn,
    )
    carrier = Senders(torch.float32)

    async def publish() -> None:
        client = ControlClient(sending.manager_url, secret=sending.secret)
        carriers = Carriers(carrier)
        publisher = Publisher(client=client, config=config.weights, carriers=carriers, in_thread=asyncio.to_thread)
        try:
            await publisher.publish(sending.version, source)
        finally:
            await client.close()

    if rank == 0:
        asyncio.run(publish())
        answers.send(carrier.sent_by_rank)
    else:
        source.serve()
    dist.barrier()
    source.close()
    model.close()


def model_weights(folder: Path) -> list[tuple[str, Any]]:
    """By name, as they are in the files of a model."""
    from safetensors.torch import load_file

    return [weight for file in sorted(folder.glob("*.safetensors")) for weight in load_file(file).items()]
