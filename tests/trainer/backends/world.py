"""Several processes that make up one world, over gloo on this machine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from streamrl.transport.collective import open_store
from tests.forked import Forked

TIMEOUT_SECONDS = 60.0
"""Of each collective: one rank that fails ends the others."""


def run_world(size: int, body: Callable[..., None], *args: Any, deadline: float = 240.0) -> None:
    """Run `body(rank, *args)` in `size` processes that share a default process group; fail as soon as one does."""
    store = open_store("127.0.0.1")
    with Forked(_member, [(rank, size, store.port, body, args) for rank in range(size)]) as ranks:
        ranks.end(seconds=deadline)


def _member(rank: int, size: int, port: int, body: Callable[..., None], args: tuple[Any, ...], answers: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    body(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
