"""A gserver of `bench_weights.py`: serves as always, and on demand receives bytes without any of streamrl around it.

Each line on stdin is a JSON object: receive `buckets` (bytes of each) in a process group, into a buffer that is
there, `repeats` times. The answer on stdout is the seconds of each repeat.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from streamrl import config as configuration
from streamrl.gserver.process import serve
from streamrl.transport.collective import broadcast, destroy_group, form_group

TIMEOUT_SECONDS = 120.0


def bare_broadcasts(order: dict[str, Any], *, rank: int, store: Any = None) -> list[float]:
    """Seconds of each repeat; rank 0 passes its store."""
    group = form_group(
        address="127.0.0.1",
        port=order["port"],
        rank=rank,
        world_size=order["world_size"],
        name=order["name"],
        backend="gloo",
        timeout=TIMEOUT_SECONDS,
        store=store,
    )
    buffer = torch.ones(max(order["buckets"]), dtype=torch.uint8)
    seconds = []
    for _ in range(order["repeats"]):
        began = time.perf_counter()
        for size in order["buckets"]:
            broadcast(buffer[:size], group, what="bare bytes")
        seconds.append(time.perf_counter() - began)
    destroy_group(group)
    return seconds


def follow_orders(index: int) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        seconds = bare_broadcasts(order, rank=index + 1)
        sys.stdout.write(json.dumps(seconds) + "\n")
        sys.stdout.flush()


def main() -> None:
    config, manager, index, folder = sys.argv[1:]
    threading.Thread(target=follow_orders, args=(int(index),), daemon=True).start()
    asyncio.run(serve(configuration.load(config), manager_url=manager, index=int(index), model_dir=Path(folder)))


if __name__ == "__main__":
    main()
