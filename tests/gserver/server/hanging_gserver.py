"""A gserver process that waits for a broadcast that never comes; says `receiving`, then stops on stdin."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp

from streamrl.gserver.server.process import running
from tests.gserver.serving import config_of


async def main(folder: Path, port: int, group: str) -> None:
    async with (
        running(config_of(), index=0, model_dir=folder) as (_, url),
        aiohttp.ClientSession() as session,
    ):
        join = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        async with session.post(
            url + "/init_weights_update_group", json={**join, "group_name": group, "backend": "gloo"}
        ) as answer:
            assert answer.status == 200, await answer.text()
        async with session.post(url + "/begin_weight_update", json={}) as answer:
            assert answer.status == 200
        names = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": group}
        receiving = asyncio.create_task(session.post(url + "/update_weights_from_distributed", json=names))
        sys.stdout.write("receiving\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        receiving.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
