"""A gserver process that waits for a broadcast that never comes, the second of two.

It says `serving`, is told on stdin where to meet the sender (port and name of the group), and says `receiving` when it
waits.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp

from streamrl.gserver.server.process import running
from streamrl.launch.process import Component, run_component
from tests.gserver.serving import config_of

BUCKET = "/update_weights_from_distributed"
FIRST, SECOND = "model.norm.weight", "model.layers.0.input_layernorm.weight"


async def main(folder: Path) -> None:
    async with (
        running(config_of(limits={"update_seconds": 600.0}), index=0, model_dir=folder) as (_, url),
        aiohttp.ClientSession() as session,
    ):
        say("serving")
        port, group = (await asyncio.to_thread(sys.stdin.readline)).split()
        join = {"master_address": "127.0.0.1", "master_port": int(port), "rank_offset": 1, "world_size": 2}
        async with session.post(
            url + "/init_weights_update_group", json={**join, "group_name": group, "backend": "gloo"}
        ) as answer:
            assert answer.status == 200, await answer.text()
        async with session.post(url + "/begin_weight_update", json={}) as answer:
            assert answer.status == 200
        receive = {"dtypes": ["float32"], "shapes": [[64]], "group_name": group}
        async with session.post(url + BUCKET, json={**receive, "names": [FIRST]}) as answer:
            assert answer.status == 200, await answer.text()
        receiving = asyncio.create_task(session.post(url + BUCKET, json={**receive, "names": [SECOND]}).__aenter__())
        await asyncio.sleep(0.5)
        say("receiving")
        await receiving


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run_component(lambda: Component(lambda: main(Path(sys.argv[1])))))
