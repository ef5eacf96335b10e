"""Several processes that make up one world, over gloo on this machine."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from queue import Empty
from typing import Any

from streamrl.transport.collective import open_store
from tests.forked import forking

TIMEOUT_SECONDS = 60.0
"""Of each collective: one rank that fails ends the others."""


def run_world(size: int, body: Callable[..., None], *args: Any, deadline: float = 240.0) -> None:
    """Run `body(rank, *args)` in `size` processes that share a default process group; raise what they raise."""
    context = forking()
    store = open_store("127.0.0.1")
    results = context.Queue()
    processes = [
        context.Process(target=_member, args=(rank, size, store.port, results, body, args)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    failures = []
    try:
        for _ in processes:
            rank, failure = results.get(timeout=deadline)
            if failure:
                failures.append(f"rank {rank} of {size}:\n{failure}")
    except Empty:
        failures.append(f"not all of {size} ranks ended within {deadline} s")
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    assert not failures, "\n".join(failures)


def _member(rank: int, size: int, port: int, results: Any, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    failure = ""
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_SECONDS)
        )
        body(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        failure = traceback.format_exc()
    results.put((rank, failure))
