"""What `FunctionExecutor.load_data` loads in each kind of graph."""

from __future__ import annotations

import asyncio

import msgspec

from streamrl.config import from_dict
from streamrl.ledger import Selection
from streamrl.trainer import calls
from streamrl.trainer.calls import CallDone, ClearDataCache, StorageNotice
from streamrl.trainer.graph import graph_of
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.trainer.master.executor import FunctionExecutor
from streamrl.trainer.master.history import History
from streamrl.trainer.master.workers import ModelWorkers
from streamrl.transport.synchronous import GenerateGroups, GenerateGroupsReply, ScoreGroupsReply
from streamrl.types import SampleMeta
from tests.groups import admitted_ledger, make_group

GROUPS = 3


class Channel:
    """Model workers that do what they are asked for; a rollout worker that stores what it is asked for."""

    def __init__(self, stored: asyncio.Queue[StorageNotice]) -> None:
        self.calls = []
        self._stored = stored
        self._made = 0

    async def wait_for(self, workers, *, patience):
        pass

    async def living(self, workers, *, patience):
        return list(workers)

    async def request(self, calls, reply, *, timeout):
        self.calls += calls.values()
        return dict.fromkeys(calls, CallDone(compute_seconds=0.0))

    async def call(self, worker, call, reply, *, timeout):
        self.calls.append(call)
        if isinstance(call, GenerateGroups):
            self._made += call.groups
            return GenerateGroupsReply(list(range(self._made - call.groups, self._made)))
        self._stored.put_nowait(arrived(*call.seqs))
        return ScoreGroupsReply(call.seqs)


def arrived(*seqs):
    return StorageNotice([SampleMeta.of(make_group(seq), head=0) for seq in seqs])


def executor_of(graph):
    settings = {"graph": graph, "batch_groups": GROUPS}
    config = from_dict({"trainer": settings, "staleness": {"max_staleness": 0}, "rollout": {"workers": 1}})
    stored: asyncio.Queue[StorageNotice] = asyncio.Queue()
    channel = Channel(stored)
    buffer = AsyncIOSequenceBuffer(graph_of(config), admitted_ledger(batch=GROUPS, rejected=[1]))
    executor = FunctionExecutor(
        graph=graph_of(config),
        buffer=buffer,
        channel=channel,
        workers=ModelWorkers(config, channel=channel),
        stored=stored,
        former=BatchFormer(config),
        config=config,
        history=History(config, None),
        weights_at_rest=asyncio.Lock(),
    )
    return executor, buffer, channel, stored


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_asynchronous_graph_loads_the_groups_that_streamdatasets_have_stored():
    executor, buffer, channel, stored = executor_of("asynchronous")
    loading = asyncio.create_task(executor.load_data())
    stored.put_nowait(arrived(0, 1, 2))
    await turns()
    assert [seq for seq in range(4) if seq in buffer] == [0, 2]
    assert channel.calls == [ClearDataCache([1], come_again=False)]  # it was given up before it came
    loading.cancel()


async def test_a_synchronous_graph_loads_prompts_while_a_batch_is_waited_for():
    executor, buffer, channel, _ = executor_of("synchronous")
    loading = asyncio.create_task(executor.load_data())
    await turns()
    assert channel.calls == []

    def all_held(ready):
        enough = len(ready) >= GROUPS
        return Selection(ready.oldest(GROUPS) if enough else [], drop=[], missing=[], short=GROUPS - len(ready))

    batch, _ = await asyncio.wait_for(buffer.take_batch(all_held), 30)
    await asyncio.wait_for(executor.until_generated(), 30)
    assert len(batch) == GROUPS
    assert channel.calls[0] == GenerateGroups(GROUPS)
    assert {span.name for span in executor.take_spans()} == {"actor_gen", "rew_inf"}
    made = len(channel.calls)
    await turns()
    assert len(channel.calls) == made, "no prompt is loaded before the next batch is waited for"
    loading.cancel()


def test_calls_and_replies_hold_no_arrays():
    """Only metadata reaches the controller; arrays stay with the model workers."""
    messages = [each for each in vars(calls).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    _, schemas = msgspec.json.schema_components(messages)  # raises for a type that is none of JSON's
    assert "TrainReply" in schemas
    assert [name for name, schema in schemas.items() if "base64" in str(schema)] == []  # of a field of bytes
