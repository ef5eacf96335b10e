"""A model worker's calls, over a channel that is scripted here."""

from __future__ import annotations

import asyncio
from pathlib import Path

from streamrl.config import from_dict
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import Publish
from streamrl.trainer.model_worker import ModelWorker


class Withdrawing:
    """The master gives up its one call before all workers have it; `withdrawn` is set once it has."""

    def __init__(self, call):
        self.withdrawn = asyncio.Event()
        self.answered = []
        self._calls = asyncio.Queue()
        self._calls.put_nowait((7, call))

    async def receive(self):
        return await self._calls.get()

    async def begin(self, call_id):
        await self.withdrawn.wait()
        return False

    async def reply(self, call_id, result):
        self.answered.append(result)

    async def fail(self, call_id, traceback):
        self.answered.append(traceback)


async def test_weights_are_free_again_after_a_publication_that_was_withdrawn():
    dataset = StreamDataset(rank=0, capacity_groups=4)
    worker = ModelWorker(from_dict({}), index=0, model_dir=Path("."), dataset=dataset, client=None)
    channel = Withdrawing(Publish(version=1))
    working = asyncio.create_task(worker.work(channel))
    await asyncio.sleep(0.05)
    assert not worker._weights_free.is_set()
    channel.withdrawn.set()
    await asyncio.sleep(0.05)
    assert worker._weights_free.is_set()
    assert channel.answered == []
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await worker.close()
