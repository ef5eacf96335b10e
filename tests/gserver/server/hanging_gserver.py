"""A gserver process that waits for a broadcast that never comes, the second of two; says `receiving` when it does."""

from __future__ import annotations

import sys
from pathlib import Path

import aiohttp

from streamrl.gserver.server.process import running
from streamrl.launch.process import run_component
from tests.gserver.serving import config_of

FIRST, SECOND = "model.norm.weight", "model.layers.0.input_layernorm.weight"


async def main(folder: Path, port: int, group: str) -> None:
    async with (
        running(config_of(weights={"timeout_seconds": 600.0}), index=0, model_dir=folder) as (_, url),
        aiohttp.ClientSession() as session,
    ):
        join = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
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
            sys.stdout.write("receiving\n")
            sys.stdout.flush()
            await answer.read()


if __name__ == "__main__":
    model_dir, store_port, group_name = sys.argv[1:]
    sys.exit(run_component(lambda: lambda: main(Path(model_dir), int(store_port), group_name)))
