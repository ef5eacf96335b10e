"""The data that the executor loads, and the hooks of each call."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from streamrl.config import Config, from_dict
from streamrl.trainer import calls
from streamrl.trainer.calls import CallDone, ClearDataCache, Offload, ParamRealloc, StorageNotice, TrainReply
from streamrl.trainer.graph import MFC, downstream, graph_of
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.trainer.master.executor import FunctionExecutor
from streamrl.trainer.master.history import History
from streamrl.trainer.master.workers import ModelWorkers
from tests.groups import admitted_ledger, make_meta

STEPS = 8
OFFLOAD = Offload("ref")


class Workers:
    """A channel whose workers do nothing; it keeps the requests to them."""

    def __init__(self):
        self.calls = []

    async def request(self, calls, reply_type, *, timeout):
        self.calls += calls.values()
        reply = CallDone(compute_seconds=0.0) if reply_type is CallDone else TrainReply(0.0, 0.0, {}, {}, {})
        return dict.fromkeys(calls, reply)


class Master:
    """An executor with all that it works on; it has reached the version `begin`."""

    def __init__(self, config, *, begin=0, rejected=()):
        self.workers = Workers()
        self.stored: asyncio.Queue[StorageNotice] = asyncio.Queue()
        self.ledger = admitted_ledger(count=10_000, rejected=rejected)
        self.buffer = AsyncIOSequenceBuffer(graph_of(config), self.ledger)
        self.former = BatchFormer(config)
        self.history = History(config, None)
        self.history.policy_version = begin
        self.executor = FunctionExecutor(
            graph=graph_of(config),
            buffer=self.buffer,
            channel=self.workers,
            workers=ModelWorkers(config, channel=self.workers),
            stored=self.stored,
            former=self.former,
            config=config,
            history=self.history,
            weights_at_rest=asyncio.Lock(),
        )


async def test_the_groups_that_streamdatasets_have_stored_are_loaded():
    master = Master(from_dict({}), rejected=[1])
    loading = asyncio.create_task(master.executor.load_data())
    master.stored.put_nowait(StorageNotice([make_meta(seq) for seq in range(3)]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert [seq for seq in range(4) if seq in master.buffer] == [0, 2]
    assert master.workers.calls == [ClearDataCache([1], come_again=False)]  # it was given up before it came
    loading.cancel()


def test_calls_and_replies_hold_no_arrays():
    """Only metadata reaches the controller; arrays stay with the model workers."""
    messages = [each for each in vars(calls).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    _, schemas = msgspec.json.schema_components(messages)  # raises for a type that is none of JSON's
    assert "TrainReply" in schemas
    assert [name for name, schema in schemas.items() if "base64" in str(schema)] == []  # of a field of bytes


def hooked_graph(config: Config) -> list[MFC]:
    """Every call moves weights, each after a number of versions of its own; `ref_inf` runs twice as often as steps."""
    hooks = {
        "ref_inf": {"post_hooks": (ParamRealloc("actor", "ref", every=3), OFFLOAD), "groups": 1},
        "actor_inf": {"pre_hooks": (ParamRealloc("ref", "actor", every=1),)},
        "actor_train": {
            "pre_hooks": (ParamRealloc("ref", "actor", every=2),),
            "post_hooks": (ParamRealloc("a", "b", 2),),
        },
    }
    return [msgspec.structs.replace(mfc, **hooks[mfc.name]) for mfc in downstream(config)]


async def follow(begin):
    """All calls of some steps from version `begin`, each with the version that was reached when it was made."""
    trainer = {"graph": f"{__name__}:hooked_graph", "batch_groups": 2}
    config = from_dict({"trainer": trainer, "algorithm": {"kl_coef": 0.1, "proximal": "recompute"}})
    master = Master(config, begin=begin)
    arrivals = asyncio.create_task(master.executor.run_arrivals())
    found = []
    for version in range(begin, begin + STEPS):
        master.history.policy_version = version
        master.buffer.put_batch([make_meta(2 * version + i) for i in range(2)])
        batch, _ = await master.buffer.take_batch(
            lambda ready, version=version: master.former.select(
                ready, policy_version=version, next_in_order=master.ledger.next_in_order
            )
        )
        await master.executor.execute_step(batch)
        master.buffer.trained_on(meta.seq for meta in batch)
        found += [(version, call) for call in master.workers.calls]
        master.workers.calls.clear()
    arrivals.cancel()
    return found


@pytest.mark.parametrize("begin", [0, 4])
def test_weights_move_once_for_each_so_many_versions_whatever_call_moves_them(begin):
    found = asyncio.run(follow(begin))
    assert [call.mfc for _, call in found] == ["ref_inf", "ref_inf", "actor_inf", "actor_train"] * STEPS

    def moved(name, kind):
        return [v for v, call in found if call.mfc == name for hook in getattr(call, kind) if hook != OFFLOAD]

    after = [v for v in range(begin, begin + STEPS) if v > 0]
    assert moved("ref_inf", "post_hooks") == [v for v in after if v % 3 == 0]  # with the first of a version's calls
    assert moved("actor_inf", "pre_hooks") == after
    assert moved("actor_train", "pre_hooks") == [v for v in after if v % 2 == 0]
    assert moved("actor_train", "post_hooks") == [v for v in range(begin, begin + STEPS) if (v + 1) % 2 == 0]
    assert all(OFFLOAD in call.post_hooks for _, call in found if call.mfc == "ref_inf")  # with every call
