"""Rank 0 broadcasts weights that are spread over two ranks, to one gserver's receiver in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from streamrl.checksum import tensor_sums
from streamrl.config import from_dict
from streamrl.errors import PublicationError
from streamrl.gserver.server.receiver import ExpectedWeights, WeightReceiver
from streamrl.trainer.layout import Layout
from streamrl.trainer.worker.weight_broadcast import Broadcaster
from streamrl.trainer.worker.weight_source import WeightSource
from streamrl.transport.collective import open_store
from streamrl.transport.control import Broadcast, PublishBeginReply, TensorSpec
from streamrl.transport.generation import InitWeightsUpdateGroup, UpdateWeightsFromDistributed
from tests.trainer.backends.reference import make_spec, save_models
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world
from tests.trainer.worker.kept import Kept

CASES = ["torch", "torch, sharded", "megatron, two tensor ranks", "megatron, two stages", "megatron, sharded"]
MEETING_SECONDS = 2.0


def _publish(rank: int, port: int, models: Path) -> None:
    from streamrl.trainer.backends.megatron.model import MegatronModel
    from streamrl.trainer.backends.torch import TorchModel

    def megatron(shard: bool = False, **layout: int) -> MegatronModel:
        spec = make_spec(models / "llama", shard=shard)
        return MegatronModel(spec, layout=Layout(**layout), rank=rank, timeout_seconds=TIMEOUT_SECONDS)

    made = {
        "torch": lambda: TorchModel(make_spec(models / "llama"), world=2),
        "torch, sharded": lambda: TorchModel(make_spec(models / "llama", shard=True), world=2),
        "megatron, two tensor ranks": lambda: megatron(tensor=2),
        "megatron, two stages": lambda: megatron(pipeline=2),
        "megatron, sharded": lambda: megatron(data=2, shard=True),
    }
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for case in CASES:
        model: Any = made[case]()
        source = WeightSource(model, world=2, timeout_seconds=TIMEOUT_SECONDS, dtype=torch.bfloat16)
        if rank == 0:
            _send(source, store, case)
            source.end()
        else:
            source.serve()
        model.close()


def _send(source: WeightSource, store: Any, case: str) -> None:
    """Break one pass off, fail to meet anybody in a first attempt, and send all weights in a second one."""
    weights = source.weights()
    next(weights)
    weights.close()
    config = from_dict({"weights": {"bucket_mb": 0.02}, "limits": {"update_seconds": MEETING_SECONDS}})
    sender = Broadcaster(config, backend="gloo", dtype=torch.bfloat16, device=torch.device("cpu"))
    sender.prepare(1, source)
    sender.announce()
    with pytest.raises(PublicationError, match="could not meet the others"):
        sender.send(PublishBeginReply(group_name=f"nobody in {case}", world_size=2))
    sender.abort()
    store.set(f"{case}: announced", msgspec.json.encode(sender.announce()))
    sums = sender.send(PublishBeginReply(group_name=case, world_size=2))
    store.set(f"{case}: sums", msgspec.json.encode(sums))
    sender.close()


def receive_bucket(group: str, bucket: list[TensorSpec]) -> UpdateWeightsFromDistributed:
    return UpdateWeightsFromDistributed(
        names=[spec.name for spec in bucket],
        dtypes=[spec.dtype for spec in bucket],
        shapes=[spec.shape for spec in bucket],
        group_name=group,
        weight_version="1",
    )


@pytest.mark.timeout(240)
async def test_all_weights_arrive_to_the_bit_whatever_the_layout(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    save_models(tmp_path)
    trained = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "llama" / "model.safetensors").items()}
    store = open_store("127.0.0.1")
    world = asyncio.create_task(asyncio.to_thread(run_world, 2, _publish, store.port, tmp_path))
    for case in CASES:
        kept = Kept()
        receiver = WeightReceiver(
            expected=ExpectedWeights({name: tuple(tensor.shape) for name, tensor in trained.items()}, torch.bfloat16),
            aside=kept,
            device=torch.device("cpu"),
            timeout=TIMEOUT_SECONDS,
        )
        announced = msgspec.json.decode(await asyncio.to_thread(store.get, f"{case}: announced"), type=Broadcast)
        assert len(announced.buckets) > 1
        await receiver.join_group(InitWeightsUpdateGroup(announced.address, announced.port, 1, 2, case, "gloo"))
        await receiver.begin()
        for bucket in announced.buckets:
            await receiver.receive(receive_bucket(case, bucket))
        assert (await receiver.take()).version == "1"
        sums = msgspec.json.decode(await asyncio.to_thread(store.get, f"{case}: sums"))
        assert kept.tensors.keys() == trained.keys()
        for name, tensor in trained.items():
            assert torch.equal(kept.tensors[name].view(torch.int16), tensor.view(torch.int16)), f"{case}: {name}"
            assert sums[name] == tensor_sums(tensor)
        await receiver.close()
    await world
