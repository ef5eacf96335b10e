"""Broadcasts between processes: all arrive, in order, and a peer that is gone is told of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from streamrl.errors import DeadlineExceeded, PublicationError
from streamrl.transport.addresses import use_interface_of
from streamrl.transport.collective import (
    AT_ONCE,
    broadcasts,
    destroy_group,
    form_group,
    join_world,
    open_store,
)
from tests.forked import Forked

SIZES = [1, 300_000, 2, 3, 1_000_000, 5, 7, 400_000, 11]


def group(rank: int, port: int, store: Any = None) -> Any:
    return form_group(
        address="127.0.0.1", port=port, rank=rank, world_size=2, name="few", backend="gloo", timeout=30, store=store
    )


def receive(port: int, answers: Any) -> None:
    joined = group(1, port)
    found = [
        (name, tensor.unique().tolist())
        for name, tensor in broadcasts(((str(i), torch.zeros(size)) for i, size in enumerate(SIZES)), joined)
    ]
    answers.send(found)
    destroy_group(joined)


def leave(port: int, answers: Any) -> None:
    destroy_group(group(1, port))
    answers.send("left")


@contextmanager
def met(other: Callable[[int, Any], None]) -> Iterator[tuple[Any, Any]]:
    """A group with a process that does `other`, and that process."""
    store = open_store("127.0.0.1")
    with Forked(other, [(store.port,)]) as ranks:
        joined = group(0, store.port, store)
        yield joined, ranks
        ranks.end()
    destroy_group(joined)


def test_many_at_once() -> None:
    begun = through = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal begun
        for i, size in enumerate(SIZES):
            begun = i + 1
            yield str(i), torch.full((size,), float(i))

    with met(receive) as (joined, ranks):
        for name, _ in broadcasts(tensors(), joined):
            assert name == str(through)
            through += 1
            assert begun <= through + AT_ONCE
        assert through == len(SIZES)
        assert ranks.take(1) == [[(str(i), [float(i)]) for i in range(len(SIZES))]]


def test_the_store_listens_where_it_is_said_to() -> None:
    store = open_store("127.0.0.1")
    found = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [at.ip for at in found if at.port == store.port] == ["127.0.0.1"]


def test_a_peer_that_is_gone() -> None:
    with met(leave) as (joined, ranks):
        assert ranks.take(1) == ["left"]
        with pytest.raises(PublicationError, match="broadcast of a weight failed"):
            for _ in broadcasts([("a weight", torch.ones(10_000_000))] * 9, joined):
                pass


def test_a_group_that_does_not_form_says_where_and_with_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    use_interface_of("127.0.0.1", environment=(chosen := {}))
    for name, interface in chosen.items():
        monkeypatch.setenv(name, interface)
    store = open_store("127.0.0.1")
    told = rf"rank 0 of 2 \(gloo at \w+ \(127\.0\.0\.1[^)]*\)\) could not .*, with rank 0 at 127\.0\.0\.1:{store.port},"
    began = time.monotonic()
    with pytest.raises(PublicationError, match=told):
        form_group(
            address="127.0.0.1",
            port=store.port,
            rank=0,
            world_size=2,
            name="alone",
            backend="gloo",
            timeout=1.0,
            store=store,
        )
    with pytest.raises(DeadlineExceeded, match="the trainer's process group: rank 1 of 2"):
        join_world(address="127.0.0.1", port=1, rank=1, world_size=2, backend="gloo", timeout=1.0)
    assert time.monotonic() - began < 60
