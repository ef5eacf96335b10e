"""Two model workers broadcast in turn over NCCL to a gserver: on three GPUs, or on one that several ranks share."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from streamrl.config import WeightsConfig
from streamrl.gserver.server.receiver import Expected, WeightReceiver
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.worker.weight_source import Senders
from streamrl.transport.collective import join_store, open_store
from streamrl.transport.control import Broadcast, PublishBeginReply
from streamrl.transport.generation import InitWeightsUpdateGroup, Meeting, ReceiveWeights
from tests.devices import DEVICE, ON_DEVICE, needs_nccl_ranks, rank_device
from tests.forked import Forked
from tests.trainer.backends.reference import make_spec, save_models
from tests.trainer.senders import one_of_two
from tests.trainer.worker.kept import Kept

pytestmark = [
    *ON_DEVICE,
    pytest.mark.timeout(180),
    needs_nccl_ranks(3),
]
DEADLINE = 60.0
BACKEND: Any = "nccl" if DEVICE.type == "cuda" else "gloo"
VERSIONS = (1, 2)
"""The second goes in the groups of the first."""


def _send(rank: int, port: int, folder: Path, answers: Any) -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank_device(rank))
    store = join_store("127.0.0.1", port, timeout=DEADLINE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=DEADLINE))
    config = WeightsConfig(bucket_mb=0.02, timeout_seconds=DEADLINE)
    source, _ = one_of_two(
        TorchModel(make_spec(folder, device=rank_device(rank)), world=2),
        config,
        rank=rank,
        dtype=torch.bfloat16,
        timeout_seconds=DEADLINE,
        in_turn=True,
        backend=BACKEND,
        device=rank_device(rank),
    )
    senders = Senders(torch.bfloat16)
    for version in VERSIONS:
        if rank:
            source.serve()
            continue
        senders.prepare(version, source)
        answers.send(msgspec.json.encode(senders.announce()))
        answers.send(senders.send(PublishBeginReply(group_name="g", world_size=2)))
        source.end()
    source.close()


async def test_they_take_turns_and_all_arrives(tmp_path: Path) -> None:
    save_models(tmp_path)
    folder = tmp_path / "llama"
    trained = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    store = open_store("127.0.0.1")
    kept = Kept()
    receiver = WeightReceiver(
        expected=Expected(shapes, torch.bfloat16), aside=kept, device=rank_device(2), timeout=DEADLINE
    )
    with Forked(_send, [(rank, store.port, folder) for rank in range(2)]) as ranks:
        for version in VERSIONS:
            (content,) = await asyncio.to_thread(ranks.take, 1)
            announced = msgspec.json.decode(content, type=Broadcast)
            assert set(announced.turns) == {0, 1}
            if version == VERSIONS[0]:
                first, second = (Meeting(sender.address, sender.port) for sender in announced.senders)
                await receiver.join_group(
                    InitWeightsUpdateGroup(first.address, first.port, 1, 2, "g", BACKEND, further_senders=[second])
                )
            await receiver.begin(announced.transfer)
            buckets = [sender.buckets for sender in announced.senders]
            message = ReceiveWeights("g", buckets, [0, 0], str(version), turns=announced.turns)
            await receiver.receive_all(message, lambda _: None)
            (sums,) = await asyncio.to_thread(ranks.take, 1)
            assert await receiver.staged_sums() == sums
            await receiver.take()
            assert all(torch.equal(kept.tensors[name].cpu(), tensor) for name, tensor in trained.items())
        await asyncio.to_thread(ranks.end)
    await receiver.close()
