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
from streamrl.launch.process import run_component
from tests.gserver.serving import config_of

FIRST, SECOND = "model.norm.weight", "model.layers.0.input_layernorm.weight"


async def main(folder: Path) -> None:
    async with (
        running(config_of(weights={"timeout_seconds": 600.0}), index=0, model_dir=folder) as (_, url),
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
        buckets = [[{"name": name, "dtype": "float32", "shape": [64]}] for name in (FIRST, SECOND)]
        message = {"group_name": group, "senders": [buckets], "first_buckets": [0], "weight_version": "1"}
        async with session.post(url + "/receive_weights", json=message) as answer:
            assert b'"buckets":[1]' in await answer.content.readline()
            say("receiving")
            await answer.read()


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run_component(lambda: lambda: main(Path(sys.argv[1]))))
