"""One weight update by itself, ended at moments that a whole manager reaches only by chance."""

from __future__ import annotations

import asyncio

from streamrl.config import from_dict
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.gserver.updates.update import WeightGroup, WeightUpdate
from streamrl.ledger import Ledger
from streamrl.transport.control import Snapshot
from streamrl.transport.generation import GenerationClient
from tests.gserver.scripted import scripted


async def test_an_update_that_is_left_before_its_pause_was_asked_for_ends() -> None:
    config = from_dict({"limits": {"update_seconds": 2.0}, "weights": {"checksum": False}})
    client = GenerationClient(timeout=2.0)
    async with scripted(staged=False) as (peer,):
        gserver = Gserver(0, peer.url)
        update = WeightUpdate(
            version=1,
            weights=Snapshot(folder="/weights/v1"),
            group=WeightGroup("g", (gserver,)),
            joined=False,
            calls=WeightCalls(client, timeout=2.0),
            config=config,
            ledger=Ledger(groups_per_batch=1, max_staleness=0, lease_seconds=1.0),
            on_swapped=lambda version: None,
        )
        update.commit("", {})
        running = asyncio.create_task(update.run())
        await asyncio.sleep(0)  # the pause has been decided on, but its call has not begun
        update.leave()
        reply = await asyncio.wait_for(running, 10)
        assert (reply.done, reply.error) == (False, "the manager leaves")
        assert peer.calls == ["/continue_generation"]
    await client.close()
