"""A model worker broadcasts weights over NCCL to a gserver: on two GPUs, or on one that both ranks share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import from_dict
from streamrl.gserver.server.receiver import ExpectedWeights, WeightReceiver
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.worker.weight_broadcast import Broadcaster
from streamrl.trainer.worker.weight_source import WeightSource
from streamrl.transport.control import Broadcast, PublishBeginReply
from streamrl.transport.generation import InitWeightsUpdateGroup
from tests.devices import DEVICE, ON_DEVICE, needs_nccl_ranks, rank_device
from tests.forked import Forked
from tests.trainer.backends.reference import make_spec, save_models
from tests.trainer.worker.kept import Kept
from tests.trainer.worker.test_weight_source import receive_bucket

pytestmark = [
    *ON_DEVICE,
    pytest.mark.timeout(180),
    needs_nccl_ranks(2),
]
DEADLINE = 60.0
BACKEND: Any = "nccl" if DEVICE.type == "cuda" else "gloo"
VERSIONS = (1, 2)
"""The second goes in the group of the first."""


def _send(folder: Path, answers: Any) -> None:
    device = rank_device(0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = TorchModel(make_spec(folder, device=device), world=1)
    source = WeightSource(model, world=1, timeout_seconds=DEADLINE, dtype=torch.bfloat16)
    config = from_dict({"weights": {"bucket_mb": 0.02}, "limits": {"update_seconds": DEADLINE}})
    sender = Broadcaster(config, backend=BACKEND, dtype=torch.bfloat16, device=device)
    for version in VERSIONS:
        sender.prepare(version, source)
        answers.send(msgspec.json.encode(sender.announce()))
        answers.send(sender.send(PublishBeginReply(group_name="g", world_size=2)))
    sender.close()


async def test_all_weights_arrive_in_each_version(tmp_path: Path) -> None:
    save_models(tmp_path)
    folder = tmp_path / "llama"
    trained = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    kept = Kept()
    receiver = WeightReceiver(
        expected=ExpectedWeights(shapes, torch.bfloat16), aside=kept, device=rank_device(1), timeout=DEADLINE
    )
    with Forked(_send, [(folder,)]) as ranks:
        for version in VERSIONS:
            (content,) = await asyncio.to_thread(ranks.take, 1)
            announced = msgspec.json.decode(content, type=Broadcast)
            if version == VERSIONS[0]:
                await receiver.join_group(InitWeightsUpdateGroup(announced.address, announced.port, 1, 2, "g", BACKEND))
            await receiver.begin()
            for bucket in announced.buckets:
                await receiver.receive(receive_bucket("g", bucket))
            (sums,) = await asyncio.to_thread(ranks.take, 1)
            assert await receiver.staged_sums() == sums
            await receiver.take()
            assert all(torch.equal(kept.tensors[name].cpu(), tensor) for name, tensor in trained.items())
        await asyncio.to_thread(ranks.end)
    await receiver.close()
