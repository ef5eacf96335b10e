"""Several ranks broadcast a part of the weights each, to one gserver's receiver in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from streamrl.checksum import tensor_sums
from streamrl.gserver.server.receiver import Expected, WeightReceiver
from streamrl.trainer.backends.base import dealt, spread
from streamrl.trainer.layout import Layout
from streamrl.transport.collective import open_store
from streamrl.transport.control import Broadcast
from streamrl.transport.generation import InitWeightsUpdateGroup, Meeting, ReceiveWeights
from tests.trainer.backends.reference import make_spec, save_models
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world

CASES = ["torch", "torch, sharded", "megatron, two tensor ranks", "megatron, two stages", "megatron, sharded"]
BUCKET_MB = 0.005


class Kept:
    """Keeps what comes; a `WeightsAside`."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def store(self, name: str, tensor: Tensor) -> str:
        self.tensors[name] = tensor.clone()
        return tensor_sums(tensor)

    def place(self, name: str) -> Tensor | None:
        return None

    def sums(self, name: str) -> str:
        return tensor_sums(self.tensors[name])

    def adopt(self, weights: Mapping[str, Tensor]) -> bool:
        return False

    def forget(self) -> None:
        self.tensors.clear()

    def make_ready(self) -> None:
        """There is nothing to do."""


def _publish(rank: int, port: int, models: Path) -> None:
    from streamrl.config import WeightsConfig
    from streamrl.trainer.backends.megatron.model import MegatronModel
    from streamrl.trainer.backends.torch import TorchModel
    from streamrl.trainer.worker.weight_source import Senders, WeightSource
    from streamrl.transport.collective import Broadcaster
    from streamrl.transport.control import PublishBeginReply

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

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
    for case in CASES:
        model: Any = made[case]()
        own = Broadcaster(
            WeightsConfig(bucket_mb=BUCKET_MB), backend="gloo", dtype=torch.bfloat16, device=torch.device("cpu")
        )
        source = WeightSource(
            model,
            rank=rank,
            world=2,
            timeout_seconds=TIMEOUT_SECONDS,
            dtype=torch.bfloat16,
            own=own,
            most_senders=2,
        )
        if rank:
            source.serve()
        else:
            senders = Senders(torch.bfloat16)
            senders.prepare(1, source)
            store.set(f"{case} announced", msgspec.json.encode(senders.announce()))
            sums = senders.send(PublishBeginReply(group_name=f"weights of {case}", world_size=2))
            source.end()
            store.set(f"{case} sums", msgspec.json.encode(sums))
        store.set(f"{case} sent by {rank}", str(own.sent_bytes))
        store.wait([f"{case} received"])
        source.close()
        model.close()


@pytest.mark.timeout(240)
async def test_each_rank_sends_its_part_and_the_weights_are_those_that_one_rank_would_send(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    save_models(tmp_path)
    trained = {name: t.bfloat16() for name, t in load_file(tmp_path / "llama" / "model.safetensors").items()}
    size = sum(tensor.nbytes for tensor in trained.values())
    largest = max(tensor.nbytes for tensor in trained.values())
    store = open_store("127.0.0.1")
    world = asyncio.create_task(asyncio.to_thread(run_world, 2, _publish, store.port, tmp_path))

    async def told(key: str) -> bytes:
        value: bytes = await asyncio.to_thread(store.get, key)
        return value

    for case in CASES:
        announced = msgspec.json.decode(await told(f"{case} announced"), type=Broadcast)
        assert len(announced.senders) == 2, case
        kept = Kept()
        receiver = WeightReceiver(
            expected=Expected({name: tuple(t.shape) for name, t in trained.items()}, torch.bfloat16),
            aside=kept,
            device=torch.device("cpu"),
            timeout=TIMEOUT_SECONDS,
        )
        first, *further = [Meeting(sender.address, sender.port) for sender in announced.senders]
        name = f"weights of {case}"
        await receiver.join_group(
            InitWeightsUpdateGroup(first.address, first.port, 1, 2, name, "gloo", further_senders=further)
        )
        await receiver.begin(announced.transfer)
        progress: list[list[int]] = []
        await receiver.receive_all(
            ReceiveWeights(name, [sender.buckets for sender in announced.senders], [0, 0], "1"), progress.append
        )
        await receiver.take()
        sums = msgspec.json.decode(await told(f"{case} sums"))
        sent = [int(await told(f"{case} sent by {rank}")) for rank in range(2)]
        store.set(f"{case} received", "yes")
        await receiver.close()

        assert progress[-1] == [len(sender.buckets) for sender in announced.senders]
        assert all(count > 1 for count in progress[-1]), "of several buckets each"
        assert kept.tensors.keys() == trained.keys()
        for key, tensor in trained.items():
            assert torch.equal(kept.tensors[key].view(torch.int16), tensor.view(torch.int16)), f"{case}: {key}"
            assert sums[key] == tensor_sums(tensor)
        assert sum(sent) == size
        assert max(sent) <= size / 2 + largest
    await world


@given(
    sizes=st.lists(st.integers(1, 1000), max_size=40),
    count=st.integers(1, 9),
    most=st.integers(1, 9),
)
def test_weights_are_dealt_evenly(sizes: list[int], count: int, most: int) -> None:
    senders = spread(range(count), most)
    assert len(set(senders)) == min(count, most)
    assert senders[0] == 0
    chosen = dealt(sizes, [senders] * len(sizes))
    load = {rank: sum(s for s, r in zip(sizes, chosen, strict=True) if r == rank) for rank in senders}
    assert set(chosen) <= set(senders)
    assert max(load.values()) <= sum(sizes) / len(senders) + max(sizes, default=0)
    if sizes:
        assert 0 in chosen, "rank 0 speaks for all, so it is one of them"
