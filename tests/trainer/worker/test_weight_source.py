"""Several ranks broadcast a part of the weights each, to one gserver's receiver in this process.

In turn they do so over NCCL and to SGLang; here, too, over gloo: what the backend is makes no difference to the turns.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
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
from streamrl.errors import PublicationError, Refused
from streamrl.gserver.server.receiver import Expected, WeightReceiver
from streamrl.trainer.backends.base import dealt, spread
from streamrl.trainer.layout import Layout
from streamrl.transport.collective import open_store
from streamrl.transport.control import Broadcast, TensorSpec, turns_left
from streamrl.transport.generation import InitWeightsUpdateGroup, Meeting, ReceiveWeights
from tests.forked import Forked
from tests.trainer.backends.reference import make_spec, save_models
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world
from tests.trainer.senders import one_of_two
from tests.trainer.worker.kept import Kept

CASES = [
    *("torch", "torch, sharded", "megatron, two tensor ranks", "megatron, two stages", "megatron, sharded"),
    *("torch, in turn", "torch, sharded, in turn", "megatron, two stages, in turn"),
]
IN_TURN = ", in turn"
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
    from streamrl.trainer.worker.weight_source import Senders
    from streamrl.transport import collective
    from streamrl.transport.control import PublishBeginReply

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    times: list[tuple[float, float]] = []
    broadcasts = collective.broadcasts

    def timed(*arguments: Any, **settings: Any) -> Iterator[Any]:
        began = time.monotonic()
        yield from broadcasts(*arguments, **settings)
        times.append((began, time.monotonic()))

    collective.broadcasts = timed

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
        in_turn = case.endswith(IN_TURN)
        model: Any = made[case.removesuffix(IN_TURN)]()
        config = WeightsConfig(bucket_mb=BUCKET_MB, delta=True)
        source, own = one_of_two(
            model, config, rank=rank, dtype=torch.bfloat16, timeout_seconds=TIMEOUT_SECONDS, in_turn=in_turn
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
            store.set(f"{case} v{version} times of {rank}", msgspec.json.encode(times))
            times.clear()
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
            message = ReceiveWeights(group, buckets, [0, 0], str(version), base, turns=announced.turns)
            await receiver.receive_all(message, progress.append)
            await receiver.take()
            sums = msgspec.json.decode(await told(f"{case} v{version} sums"))
            sent[version] = [int(await told(f"{case} v{version} sent by {rank}")) for rank in range(2)]
            times = [msgspec.json.decode(await told(f"{case} v{version} times of {rank}")) for rank in range(2)]
            store.set(f"{case} v{version} received", "yes")

            if case.endswith(IN_TURN):
                in_order = sorted((*each, sender) for sender, those in enumerate(times) for each in those)
                assert [sender for *_, sender in in_order] == announced.turns
                assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(in_order)), "one at a time"
                took = [[then - now for now, then in zip(*pair, strict=True)] for pair in pairwise([[0, 0], *progress])]
                assert [steps.index(1) for steps in took] == announced.turns
            else:
                assert announced.turns == []
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
    from streamrl.trainer.worker.weight_source import Senders
    from streamrl.transport.control import PublishBeginReply

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    model: Any = TorchModel(make_spec(models / "llama"), world=2)
    source, _ = one_of_two(
        _Dying(model, after=len(model.weight_specs()) // 2) if rank else model,
        WeightsConfig(bucket_mb=BUCKET_MB),
        rank=rank,
        dtype=torch.bfloat16,
        timeout_seconds=TIMEOUT_SECONDS,
        in_turn=False,
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


def _meet_only_one(rank: int, port: int, models: Path, in_turn: bool, answers: Any) -> None:
    """Send to a receiver that meets rank 0 alone."""
    from datetime import timedelta

    from streamrl.config import WeightsConfig
    from streamrl.trainer.backends.torch import TorchModel
    from streamrl.trainer.worker.weight_source import Senders
    from streamrl.transport.control import PublishBeginReply

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    model: Any = TorchModel(make_spec(models / "llama", shard=True), world=2)
    config = WeightsConfig(bucket_mb=BUCKET_MB, timeout_seconds=MEETING_SECONDS)
    source, _ = one_of_two(
        model, config, rank=rank, dtype=torch.bfloat16, timeout_seconds=TIMEOUT_SECONDS, in_turn=in_turn
    )
    if rank:
        source.serve()
        answers.send("served")
        return
    senders = Senders(torch.bfloat16)
    senders.prepare(1, source)
    answers.send(msgspec.json.encode(senders.announce()))
    try:
        senders.send(PublishBeginReply(group_name="g", world_size=2))
    except PublicationError as error:
        answers.send(str(error))
    source.end()


MEETING_SECONDS = 2.0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("in_turn", [False, True])
async def test_a_sender_that_met_nobody_still_gives_the_others_their_weights(tmp_path: Path, in_turn: bool) -> None:
    """Otherwise they would wait for it in a gather. With turns nobody sends after the first that could not."""
    save_models(tmp_path)
    store = open_store("127.0.0.1")
    with Forked(_meet_only_one, [(rank, store.port, tmp_path, in_turn) for rank in range(2)]) as ranks:
        (content,) = await asyncio.to_thread(ranks.take, 1)
        announced = msgspec.json.decode(content, type=Broadcast)
        receiver = WeightReceiver(expected=None, aside=None, device=torch.device("cpu"), timeout=TIMEOUT_SECONDS)
        first = announced.senders[0]
        await receiver.join_group(InitWeightsUpdateGroup(first.address, first.port, 1, 2, "g", "gloo"))
        await receiver.begin()
        message = ReceiveWeights("g", [first.buckets], [0], "1", turns=[0] * len(first.buckets) if in_turn else [])
        receiving = asyncio.create_task(receiver.receive_all(message, lambda _: None))
        told = set(await asyncio.to_thread(ranks.take, 2, seconds=TIMEOUT_SECONDS / 2))
        assert "served" in told
        (error,) = told - {"served"}
        assert "rank 1: process group g/1: rank 0 of 2 (gloo" in error
        assert ("rank 0: another model worker could not send its part" in error) == in_turn
        await asyncio.wait({receiving}, timeout=TIMEOUT_SECONDS / 2)
        assert (receiving.exception() is not None) == in_turn
        await receiver.close()


def test_a_receiver_refuses_turns_that_do_not_fit_the_buckets() -> None:
    """Whoever waited for a bucket too many would wait for its deadline."""
    buckets = [
        [[TensorSpec("a", "float32", [1])], [TensorSpec("b", "float32", [1])]],
        [[TensorSpec("c", "float32", [1])]],
    ]

    async def receive(turns: list[int], first_buckets: list[int]) -> None:
        receiver = WeightReceiver(expected=None, aside=None, device=torch.device("cpu"), timeout=1.0)
        receiver._groups["g"] = [None, None], torch.device("cpu")
        await receiver.begin("t")
        assert receiver._staged is not None
        receiver._staged.buckets = [1, 0]
        await receiver.receive_all(ReceiveWeights("g", buckets, first_buckets, "1", turns=turns), lambda _: None)

    for turns, first_buckets in [([0, 1], [0, 0]), ([0, 0, 1], [1, 0]), ([0, 1, 2], [0, 0]), ([1, 1, 0], [0, 0])]:
        with pytest.raises(Refused, match="turns must name each sender once for each bucket"):
            asyncio.run(receive(turns, first_buckets))


@given(st.lists(st.integers(0, 2), max_size=20), st.data())
def test_turns_go_on_where_each_sender_begins(turns: list[int], data: st.DataObject) -> None:
    first = [data.draw(st.integers(0, turns.count(sender))) for sender in range(3)]
    left = turns_left(turns, first)
    assert [left.count(sender) for sender in range(3)] == [turns.count(s) - f for s, f in enumerate(first)]
    kept = iter(reversed(turns))
    assert all(any(sender == other for other in kept) for sender in reversed(left)), "in their order, from the end"
    assert turns_left(turns, []) == turns
