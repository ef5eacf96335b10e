"""A model worker's calls, over a channel that is scripted here."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from streamrl.config import from_dict
from streamrl.errors import ModelError, WireError
from streamrl.models import ensure_checkpoint, vocab_size
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import MinibatchShare, Publish, TrainStep
from streamrl.trainer.worker.process import GroupReceiver, ModelWorker, serve
from streamrl.transport.control import FinishRun
from tests.credentials import LeasedPusher, keys_of
from tests.groups import make_group
from tests.gserver.harness import managed, small_config


class OneCall:
    """The worker's end of a channel with one call."""

    def __init__(self, call):
        self.answered = []
        self._calls = asyncio.Queue()
        self._calls.put_nowait((7, call))

    async def receive(self):
        return await self._calls.get()

    def reply(self, request, result):
        self.answered.append(result)

    def fail(self, request, text):
        self.answered.append(text)


async def answer(worker, call):
    """What `worker` replies to `call`, its only one."""
    channel = OneCall(call)
    working = asyncio.create_task(worker.work(channel))
    async with asyncio.timeout(30):
        while not channel.answered:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return channel.answered[0]


async def test_one_that_waits_for_the_master_leaves_when_the_run_is_over(tmp_path):
    scratch = {"hidden_size": 16, "layers": 1, "heads": 2, "head_dim": 8}
    config = small_config(tmp_path, model={"path": "scratch", "scratch": scratch})
    folder = ensure_checkpoint(config, cache=tmp_path)
    async with managed(config) as run:
        await run.register("rollout")  # who is not told yet keeps the manager there
        serving = asyncio.create_task(serve(config, manager_url=run.url, model_dir=folder))
        await run.until(lambda status: any(p.role == "model_worker" for p in status.processes))
        await run.client.finish_run(FinishRun(error="rollout/0: the reward function cannot be loaded"))
        try:
            async with asyncio.timeout(5):
                await asyncio.shield(serving)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def test_the_door_knows_the_run(tmp_path):
    """What a run cannot have made is refused with the sender's name, at the very version that it may have."""
    config = from_dict(
        {
            "model": {"path": "scratch", "scratch": {"hidden_size": 16, "layers": 1, "heads": 2, "head_dim": 8}},
            "rollout": {"group_size": 2, "sampling": {"max_new_tokens": 20}},
            "data": {"max_prompt_tokens": 20},
            "gserver": {"max_context": 40},
            "trainer": {"batch_groups": 2},
        }
    )
    folder = ensure_checkpoint(config, cache=tmp_path)
    dataset = StreamDataset(rank=0, capacity_groups=8)
    door = GroupReceiver(config, dataset, model_dir=folder, policy_version=0, keys=keys_of("model_worker"))
    worker = ModelWorker(config, index=0, model_dir=folder, dataset=dataset, door=door, client=None)
    step = TrainStep("actor_train", policy_version=0, oldest_version=0, minibatches=[MinibatchShare([], 0, 0)])
    channel = OneCall(step)
    door.puller.start()
    pusher = LeasedPusher(worker="rollout/3", endpoints=[door.puller.endpoint], max_group_bytes=1 << 20)

    def group(seq, **changes):
        made = make_group(seq, version=changes.pop("version", 0), seqlens=changes.pop("seqlens", (5, 7)))
        made.packed_input_ids %= vocab_size(folder)
        return msgspec.structs.replace(made, **changes)

    async def refused(bad, says):
        with pytest.raises(WireError, match=rf"group {bad.seq} from rollout/3: {says}"):
            await pusher.push(bad)

    await refused(group(10**12), "no sequence number from")
    await refused(group(0, version=1), "policy version 1, but the newest there can be is 0")
    await refused(group(0, seqlens=(5, 7, 9)), r"3 episodes, not the 2")
    await refused(group(0, seqlens=(5, 41)), "a trajectory of 41 tokens")
    beyond = group(0)
    beyond.packed_input_ids[-1] = vocab_size(folder)
    await refused(beyond, "token ids from")
    beyond = group(0)
    beyond.rewards[0] = 1e30
    await refused(beyond, "rewards")
    working = asyncio.create_task(worker.work(channel))
    await asyncio.sleep(0.05)
    await pusher.push(group(0, version=1))
    await pusher.push(group(1))
    assert all(dataset.find(seq) is not None for seq in (0, 1))
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await pusher.close()
    door.puller.close()
    await worker.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModelError("the weights cannot be read"), r"ModelError: the weights cannot be read"),
        (KeyError("x"), r"Traceback \(most recent call last\):\n(.|\n)*KeyError: 'x'\n"),
    ],
)
async def test_a_call_that_fails_is_told_in_words_or_where_nobody_expected_it_with_its_traceback(
    monkeypatch, error, told
):
    async def fails(self, call):
        raise error

    monkeypatch.setattr(ModelWorker, "_carry_out", fails)
    dataset = StreamDataset(rank=0, capacity_groups=4)
    worker = ModelWorker(from_dict({}), index=0, model_dir=Path("."), dataset=dataset, door=None, client=None)
    channel = OneCall(Publish(version=1))
    await worker._answer(channel, 1, Publish(version=1))
    (answer,) = channel.answered
    assert re.fullmatch(told, answer)
    await worker.close()
