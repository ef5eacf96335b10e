"""Process groups across programs that share no launcher: the publisher and the gservers.

Formed the way SGLang forms its weight-update group (a TCP store on rank 0, prefixed with the
group's name), so that either side may be SGLang.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from streamrl.errors import DeadlineExceeded, PublicationError

if TYPE_CHECKING:
    import torch

AT_ONCE = 4
"""Broadcasts."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""gloo's environment variable: the network interface at which it listens."""


def open_store(host: str) -> Any:
    """The store at which the ranks of all later groups meet, on a free port of `host` (`.port`); rank 0 opens it.

    Torch's own socket would listen at every address of the machine, and it asks nobody for a key.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(address[:2], family=family)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def gloo_environment(host: str) -> dict[str, str]:
    """The variable that has gloo listen at the interface of `host`, where this machine has it and nobody chose another.

    Else gloo listens at what the machine's own name stands for, which others may reach.
    """
    if GLOO_INTERFACE in os.environ:
        return {}
    wanted = {address[0] for *_, address in socket.getaddrinfo(host, None)}
    for name, addresses in psutil.net_if_addrs().items():
        if any(_covers(entry, wanted) for entry in addresses):
            return {GLOO_INTERFACE: name}
    return {}


def _covers(entry: Any, wanted: set[Any]) -> bool:
    """Whether an interface's address is one of `wanted`; a loopback interface has all addresses of its network."""
    if entry.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    own = ipaddress.ip_address(entry.address.partition("%")[0])
    return any(own == other or (own.is_loopback and other.is_loopback) for other in map(ipaddress.ip_address, wanted))


def form_group(
    *,
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout: float,
    store: Any = None,
) -> Any:
    """Meet the other ranks at `address:port` and answer the group; blocks until all are there.

    Rank 0 passes the `store` that it opened there. Raises `PublicationError` when the others do
    not come within `timeout` seconds.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed import distributed_c10d as c10d

    limit = timedelta(seconds=timeout)
    try:
        if store is None:
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
        # c10d has no public way to make a group next to (or without) the default one.
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            PrefixStore(name, store),
            group_name=name,  # type: ignore[arg-type]
            timeout=limit,
        )
    except (RuntimeError, ValueError) as error:
        raise PublicationError(
            f"process group {name}: rank {rank} of {world_size} could not meet the others at "
            f"{address}:{port} within {timeout:.0f} s: {error}"
        ) from error
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def join_world(
    *, address: str, port: int, rank: int, world_size: int, backend: str, timeout: float, store: Any = None
) -> None:
    """Form torch's default process group with the other ranks; rank 0 passes the `store` that it opened.

    Raises `DeadlineExceeded` when the others do not come within `timeout` seconds.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=timeout)
    try:
        if store is None:
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
        dist.init_process_group(
            backend, store=PrefixStore("world", store), rank=rank, world_size=world_size, timeout=limit
        )
    except (RuntimeError, ValueError) as error:
        raise DeadlineExceeded(
            f"rank {rank} of {world_size} could not meet the others at {address}:{port} within {timeout:.0f} s: {error}"
        ) from error


def destroy_group(group: Any) -> None:
    """Leave `group`."""
    import torch.distributed as dist

    dist.destroy_process_group(group)


def broadcast(tensor: torch.Tensor, group: Any, *, what: str) -> None:
    """Broadcast `tensor` from rank 0 in place; raises `PublicationError` on failure."""
    for _ in broadcasts([(what, tensor)], group):
        pass


def broadcasts(tensors: Iterable[tuple[str, torch.Tensor]], group: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Broadcast `tensors` (by name) from rank 0 in place, and answer each when it is through, in their order.

    Up to `AT_ONCE` are on the way, so that neither side waits for the other between two of them. Raises
    `PublicationError` on failure; others may still be on the way then.
    """
    import torch.distributed as dist

    on_the_way: deque[tuple[str, torch.Tensor, Any]] = deque()

    def first() -> tuple[str, torch.Tensor]:
        name, tensor, work = on_the_way.popleft()
        with _failing(name):
            work.wait()
        return name, tensor

    for name, tensor in tensors:
        with _failing(name):
            on_the_way.append((name, tensor, dist.broadcast(tensor, src=0, group=group, async_op=True)))
        if len(on_the_way) == AT_ONCE:
            yield first()
    while on_the_way:
        yield first()


@contextmanager
def _failing(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PublicationError(f"broadcast of {name} failed: {error}") from error
