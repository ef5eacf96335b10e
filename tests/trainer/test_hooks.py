"""Which hooks the master sends with which calls."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from streamrl.config import Config, from_dict
from streamrl.trainer.calls import CallDone, Offload, ParamRealloc, TrainReply
from streamrl.trainer.graph import MFC, downstream, graph_of
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.trainer.master.executor import FunctionExecutor
from streamrl.trainer.master.history import History
from streamrl.trainer.master.workers import ModelWorkers
from streamrl.types import SampleMeta
from tests.groups import admitted_ledger
from tests.trainer.models import random_group

STEPS = 8
OFFLOAD = Offload("ref")


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


class Workers:
    """A channel whose workers do nothing, and what was asked of them."""

    def __init__(self):
        self.calls = []

    async def request(self, calls, reply_type, *, timeout):
        self.calls.append(calls[0])
        if reply_type is CallDone:
            return dict.fromkeys(calls, CallDone(compute_seconds=0.0))
        return dict.fromkeys(calls, TrainReply(0.0, 0.0, {}, {}, {}))


async def follow(begin):
    """All calls of some steps from version `begin`, each with the version that was reached when it was made."""
    config = from_dict(
        {
            "trainer": {"graph": "tests.trainer.test_hooks:hooked_graph", "batch_groups": 2},
            "algorithm": {"kl_coef": 0.1, "proximal": "recompute"},
        }
    )
    graph, workers = graph_of(config), Workers()
    ledger = admitted_ledger(count=10_000)
    buffer = AsyncIOSequenceBuffer(graph, ledger)
    former = BatchFormer(config)
    history = History(config, None)
    history.policy_version = begin
    executor = FunctionExecutor(
        graph=graph,
        buffer=buffer,
        channel=workers,
        workers=ModelWorkers(config, channel=workers),
        stored=asyncio.Queue(),
        former=former,
        config=config,
        history=history,
        weights_at_rest=asyncio.Lock(),
    )
    arrivals = asyncio.create_task(executor.run_arrivals())
    rng = np.random.default_rng(0)
    found = []
    for version in range(begin, begin + STEPS):
        history.policy_version = version
        buffer.put_batch([SampleMeta.of(random_group(2 * version + i, rng), head=0) for i in range(2)])
        batch, _ = await buffer.take_batch(
            lambda ready, version=version: former.select(
                ready, policy_version=version, next_in_order=ledger.next_in_order
            )
        )
        await executor.execute_step(batch)
        buffer.trained_on(meta.seq for meta in batch)
        found += [(version, call) for call in workers.calls]
        workers.calls.clear()
    arrivals.cancel()
    return found


@pytest.mark.parametrize("begin", [0, 4])
def test_weights_move_once_for_each_so_many_versions_whatever_call_moves_them(begin):
    calls = asyncio.run(follow(begin))
    assert [call.mfc for _, call in calls] == ["ref_inf", "ref_inf", "actor_inf", "actor_train"] * STEPS

    def moved(name, kind):
        return [v for v, call in calls if call.mfc == name for hook in getattr(call, kind) if hook != OFFLOAD]

    after = [v for v in range(begin, begin + STEPS) if v > 0]
    assert moved("ref_inf", "post_hooks") == [v for v in after if v % 3 == 0]  # with the first of a version's calls
    assert moved("actor_inf", "pre_hooks") == after
    assert moved("actor_train", "pre_hooks") == [v for v in after if v % 2 == 0]
    assert moved("actor_train", "post_hooks") == [v for v in range(begin, begin + STEPS) if (v + 1) % 2 == 0]
    assert all(OFFLOAD in call.post_hooks for _, call in calls if call.mfc == "ref_inf")  # with every call
