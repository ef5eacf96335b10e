"""Broadcasts between processes: all arrive, in order, and a peer that is gone is reported, also without a deadline of
the group, as with NCCL."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from streamrl.errors import DeadlineExceeded, PublicationError
from streamrl.transport.addresses import use_interface_of
from streamrl.transport.collective import (
    AT_ONCE,
    NCCL_ERROR_HANDLING,
    broadcasts,
    destroy_group,
    form_group,
    join_store,
    join_world,
    open_store,
)
from tests.forked import Forked

TIMEOUT = 20.0
SIZES = [1, 300_000, 2, 3, 1_000_000, 5, 7, 400_000, 11]


def group(rank: int, port: int, store: Any = None, *, meeting_seconds: float | None = None) -> Any:
    return form_group(
        address="127.0.0.1",
        port=port,
        rank=rank,
        world_size=2,
        name="few",
        backend="gloo",
        timeout=TIMEOUT,
        meeting_seconds=meeting_seconds,
        store=store,
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


def wait_for_nothing(port: int, answers: Any) -> None:
    joined = group(1, port)
    tensor = torch.zeros(4)
    began = time.monotonic()
    try:
        for _ in broadcasts([("a", tensor)], joined, watched_seconds=TIMEOUT):
            answers.send(tensor.tolist())
        for _ in broadcasts([("b", tensor)], joined, watched_seconds=0.5):
            answers.send("something came")
    except PublicationError as error:
        answers.send(str(error))
    answers.send(time.monotonic() - began)
    destroy_group(joined)
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


def die_after_the_address_is_known(port: int, answers: Any) -> None:
    store = join_store("127.0.0.1", port, timeout=TIMEOUT)
    before = store.num_keys()

    def die() -> None:
        while store.num_keys() == before:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die).start()
    group(1, port)


@pytest.mark.parametrize("_", range(4))
def test_a_rank_that_dies_while_its_group_forms_is_awaited_no_longer_than_the_deadline(_: int) -> None:
    """gloo waits five times as long as its timeout, if it is the other rank that connects: in half of all cases."""
    store = open_store("127.0.0.1")
    with Forked(die_after_the_address_is_known, [(store.port,)]) as ranks:
        with pytest.raises(AssertionError, match="SIGKILL"):
            ranks.take(1)
        began = time.monotonic()
        with pytest.raises(PublicationError, match=r"could not meet the others, .* within 1 s"):
            group(0, store.port, store, meeting_seconds=1.0)
        assert time.monotonic() - began < TIMEOUT / 2


def test_a_broadcast_that_does_not_come_ends_by_the_watch_and_not_by_the_group() -> None:
    store = open_store("127.0.0.1")
    with Forked(wait_for_nothing, [(store.port,)]) as ranks:
        joined = group(0, store.port, store)
        for _ in broadcasts([("a", torch.ones(4))], joined):
            pass
        came, error, seconds, left = ranks.take(4, seconds=TIMEOUT)
        assert came == [1.0] * 4
        assert error == "broadcast of b failed: nothing came within 0.5 s, and the group was aborted"
        assert 0.5 <= seconds < TIMEOUT
        assert left == "left"  # its process would end after `TIMEOUT` only, when gloo gives up
        destroy_group(joined)


def test_a_group_whose_ranks_are_not_all_there_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL waits for a communicator, in the first broadcast."""
    waits = threading.Event()
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: waits.wait(TIMEOUT))
    with pytest.raises(PublicationError, match=r"broadcast of a failed: not all ranks of the group .* within 0\.1 s"):
        list(broadcasts([("a", torch.zeros(4))], None, watched_seconds=0.1))
    waits.set()


class _Failed:
    """Work of NCCL's that has failed: it says so to whoever gives a deadline."""

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            raise RuntimeError("a remote process has gone")


def test_work_that_has_failed_is_not_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[Any] = []
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: _Failed())
    monkeypatch.setattr(c10d, "_abort_process_group", aborted.append)
    with pytest.raises(
        PublicationError, match="broadcast of a failed: a remote process has gone, and the group was ab"
    ):
        list(broadcasts([("a", torch.zeros(4))], "g", watched_seconds=5.0))
    assert aborted == ["g"]


def test_errors_of_a_weight_group_are_left_to_us_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setenv(NCCL_ERROR_HANDLING, "3")

    def made(*_: Any, **options: Any) -> Any:
        seen.append(os.environ[NCCL_ERROR_HANDLING])
        raise RuntimeError("not here")

    monkeypatch.setattr(c10d, "_new_process_group_helper", made)
    with pytest.raises(PublicationError, match="not here"):
        group(0, 1, open_store("127.0.0.1"))
    assert seen == ["0"]
    assert os.environ[NCCL_ERROR_HANDLING] == "3"
