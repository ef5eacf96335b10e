"""Several ranks broadcast a part of the weights each, to one gserver's receiver in this process."""

from __future__ import annotations

import asyncio
import os
import time
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
from streamrl.errors import PublicationError
from streamrl.gserver.server.engine import Refused
from streamrl.gserver.server.receiver import Expected, WeightReceiver
from streamrl.trainer.backends.base import dealt, spread
from streamrl.trainer.layout import Layout
from streamrl.transport.collective import open_store
from streamrl.transport.control import Broadcast
from streamrl.transport.generation import InitWeightsUpdateGroup, Meeting, ReceiveWeights
from tests.forked import Forked
from tests.trainer.backends.reference import make_spec, save_models
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world
from tests.trainer.worker.kept import Kept

CASES = ["torch", "torch, sharded", "megatron, two tensor ranks", "megatron, two stages", "megatron, sharded"]
BUCKET_MB = 0.02


def changed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` after every fiftieth number has changed its sign: a zero, too."""
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in new.values():
        tensor.view(-1)[::50] *= -1
    return new


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
        config = WeightsConfig(bucket_mb=BUCKET_MB, delta=True)
        own = Broadcaster(config, backend="gloo", dtype=torch.bfloat16, device=torch.device("cpu"))
        source = WeightSource(
            model,
            rank=rank,
            world=2,
            timeout_seconds=TIMEOUT_SECONDS,
            dtype=torch.bfloat16,
            own=own,
            most_senders=2,
        )
        senders = Senders(torch.bfloat16)
        weights = load_file(models / "llama" / "model.safetensors")
        for version in (1, 2):
            model.load_weights(weights.items())
            if rank:
                source.serve()
            else:
                senders.prepare(version, source)
                announced = senders.announce()
                store.set(f"{case} v{version} announced", msgspec.json.encode(announced))
                begin = PublishBeginReply(
                    group_name=f"weights of {case}", world_size=2, as_deltas=announced.base is not None
                )
                sums = senders.send(begin)
                source.end()
                store.set(f"{case} v{version} sums", msgspec.json.encode(sums))
            store.set(f"{case} v{version} sent by {rank}", str(own.sent_bytes))
            store.wait([f"{case} v{version} received"])
            weights = changed(weights)
        source.close()
        model.close()


@pytest.mark.timeout(240)
async def test_each_rank_sends_its_part_and_the_weights_are_those_that_one_rank_would_send(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    save_models(tmp_path)
    first_weights = load_file(tmp_path / "llama" / "model.safetensors")
    trained = {
        version: {name: tensor.bfloat16() for name, tensor in weights.items()}
        for version, weights in ((1, first_weights), (2, changed(first_weights)))
    }
    size = sum(tensor.nbytes for tensor in trained[1].values())
    largest = max(tensor.nbytes for tensor in trained[1].values())
    store = open_store("127.0.0.1")
    world = asyncio.create_task(asyncio.to_thread(run_world, 2, _publish, store.port, tmp_path))

    async def told(key: str) -> bytes:
        value: bytes = await asyncio.to_thread(store.get, key)
        return value

    for case in CASES:
        kept = Kept()
        receiver = WeightReceiver(
            expected=Expected({name: tuple(t.shape) for name, t in trained[1].items()}, torch.bfloat16),
            aside=kept,
            device=torch.device("cpu"),
            timeout=TIMEOUT_SECONDS,
        )
        group = f"weights of {case}"
        sent = {0: [0, 0]}
        for version in (1, 2):
            announced = msgspec.json.decode(await told(f"{case} v{version} announced"), type=Broadcast)
            assert len(announced.senders) == 2, case
            assert announced.base == (None if version == 1 else 1)
            if version == 1:
                first, *further = [Meeting(sender.address, sender.port) for sender in announced.senders]
                await receiver.join_group(
                    InitWeightsUpdateGroup(first.address, first.port, 1, 2, group, "gloo", further_senders=further)
                )
            await receiver.begin(announced.transfer)
            progress: list[list[int]] = []
            buckets = [sender.buckets for sender in announced.senders]
            base = None if version == 1 else "1"
            await receiver.receive_all(ReceiveWeights(group, buckets, [0, 0], str(version), base), progress.append)
            await receiver.take()
            sums = msgspec.json.decode(await told(f"{case} v{version} sums"))
            sent[version] = [int(await told(f"{case} v{version} sent by {rank}")) for rank in range(2)]
            store.set(f"{case} v{version} received", "yes")

            assert progress[-1] == [len(own) for own in buckets]
            assert all(count > 1 for count in progress[-1]), "of several buckets each"
            assert kept.tensors.keys() == trained[version].keys()
            for name, tensor in trained[version].items():
                assert torch.equal(kept.tensors[name].view(torch.int16), tensor.view(torch.int16)), f"{case}: {name}"
                assert sums[name] == tensor_sums(tensor)
        assert sum(sent[1]) == size
        assert max(sent[1]) <= size / 2 + largest
        assert sum(sent[2]) - sum(sent[1]) < 0.2 * size, "what has changed, alone"
        await receiver.close()
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


class _Dying:
    """A model whose process ends at once while it sends its part."""

    def __init__(self, model: Any, *, after: int) -> None:
        self._model = model
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def gather_weights(self, **how: Any) -> Any:
        for number, weight in enumerate(self._model.gather_weights(**how)):
            if number == self._after:
                os._exit(0)
            yield weight


def _publish_with_one_that_dies(rank: int, port: int, models: Path, answers: Any) -> None:
    from datetime import timedelta

    from streamrl.config import WeightsConfig
    from streamrl.trainer.backends.torch import TorchModel
    from streamrl.trainer.worker.weight_source import Senders, WeightSource
    from streamrl.transport.collective import Broadcaster
    from streamrl.transport.control import PublishBeginReply

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    model: Any = TorchModel(make_spec(models / "llama"), world=2)
    own = Broadcaster(
        WeightsConfig(bucket_mb=BUCKET_MB), backend="gloo", dtype=torch.bfloat16, device=torch.device("cpu")
    )
    source = WeightSource(
        _Dying(model, after=len(model.weight_specs()) // 2) if rank else model,  # type: ignore[arg-type]
        rank=rank,
        world=2,
        timeout_seconds=TIMEOUT_SECONDS,
        dtype=torch.bfloat16,
        own=own,
        most_senders=2,
    )
    if rank:
        source.serve()
        return
    senders = Senders(torch.bfloat16)
    senders.prepare(1, source)
    answers.send(msgspec.json.encode(senders.announce()))
    try:
        senders.send(PublishBeginReply(group_name="g", world_size=2))
    except Exception as error:  # whatever it is: it does not wait for the dead one
        answers.send(f"{type(error).__name__}: {error}")


@pytest.mark.timeout(120)
async def test_the_death_of_a_sender_is_noticed_by_all_and_nothing_of_it_is_served(tmp_path: Path) -> None:
    save_models(tmp_path)
    names = load_file(tmp_path / "llama" / "model.safetensors")
    store = open_store("127.0.0.1")
    kept = Kept()
    receiver = WeightReceiver(
        expected=Expected({name: tuple(tensor.shape) for name, tensor in names.items()}, torch.bfloat16),
        aside=kept,
        device=torch.device("cpu"),
        timeout=TIMEOUT_SECONDS,
    )
    with Forked(_publish_with_one_that_dies, [(rank, store.port, tmp_path) for rank in range(2)]) as ranks:
        (content,) = await asyncio.to_thread(ranks.take, 1)
        announced = msgspec.json.decode(content, type=Broadcast)
        first, second = (Meeting(sender.address, sender.port) for sender in announced.senders)
        await receiver.join_group(
            InitWeightsUpdateGroup(first.address, first.port, 1, 2, "g", "gloo", further_senders=[second])
        )
        await receiver.begin(announced.transfer)
        buckets = [sender.buckets for sender in announced.senders]
        began = time.monotonic()
        with pytest.raises(PublicationError, match="broadcast of"):
            await receiver.receive_all(ReceiveWeights("g", buckets, [0, 0], "1"), lambda _: None)
        (told,) = await asyncio.to_thread(ranks.take, 1)
        assert time.monotonic() - began < TIMEOUT_SECONDS / 2, "nobody has waited for a deadline"
        assert told.startswith("PublicationError: "), told
    with pytest.raises(Refused, match="tensors were not received"):
        await receiver.take()
    await receiver.close()
