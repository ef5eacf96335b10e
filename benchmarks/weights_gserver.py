"""A gserver of `bench_weights.py`: serves as always, and on demand receives bytes without any of streamrl around it.

Each line on stdin is a JSON object: receive tensors of `sizes` (in bytes) in a process group, into memory that is
there. The answer on stdout is the seconds that it took.
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
from streamrl.gserver.server.process import serve
from streamrl.transport.collective import broadcast, destroy_group, form_group

TIMEOUT_SECONDS = 120.0
MOST_MEMORY = 2**30
"""Bytes; what is larger goes over it again."""


def bare_broadcast(order: dict[str, Any], *, rank: int, store: Any = None) -> float:
    """Seconds that it took; rank 0 passes its store."""
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
    sizes = order["sizes"]
    memory = torch.ones(min(sum(sizes), max(MOST_MEMORY, *sizes)), dtype=torch.uint8)
    pieces = []
    place = 0
    for size in sizes:
        place = place if place + size <= len(memory) else 0
        pieces.append(memory[place : place + size])
        place += size
    broadcast(memory[:1], group, what="a first byte, when all are there")
    began = time.perf_counter()
    for piece in pieces:
        broadcast(piece, group, what="bare bytes")
    seconds = time.perf_counter() - began
    destroy_group(group)
    return seconds


def follow_orders(index: int) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        seconds = bare_broadcast(order, rank=index + 1)
        sys.stdout.write(json.dumps(seconds) + "\n")
        sys.stdout.flush()


def main() -> None:
    config, manager, index, folder = sys.argv[1:]
    threading.Thread(target=follow_orders, args=(int(index),), daemon=True).start()
    asyncio.run(serve(configuration.load(config), manager_url=manager, index=int(index), model_dir=Path(folder)))


if __name__ == "__main__":
    main()
