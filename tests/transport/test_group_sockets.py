"""Process groups beside strangers who reach the ports at which their ranks meet."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Generator
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from streamrl.config import Config
from streamrl.errors import PublicationError
from streamrl.trainer.worker.weight_broadcast import Broadcaster
from streamrl.transport.collective import (
    broadcasts,
    closed_after_forming,
    closing_is_possible,
    destroy_group,
    form_group,
    open_for_good,
    open_store,
    shut,
)
from streamrl.transport.control import PublishBeginReply
from tests import hostile
from tests.forked import Forked

CLOSING = pytest.mark.skipif(not closing_is_possible(), reason="sockets of groups stay open on this machine")
NO_ANSWER_SECONDS = 0.5
CONNECTIONS = 200


def form(rank: int, port: int, name: str, *, store: Any = None, timeout: float = 30) -> Any:
    return form_group(
        address="127.0.0.1",
        port=port,
        rank=rank,
        world_size=2,
        name=name,
        backend="gloo",
        timeout=timeout,
        store=store,
    )


def take_part(port: int, answers: Any) -> None:
    """In two groups, one after another."""
    for name in ("first", "second"):
        group = form(1, port, name)
        found = torch.zeros(3)
        answers.send(name)
        list(broadcasts([(name, found)], group))
        answers.send(found.tolist())
        destroy_group(group)


def listening() -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=NO_ANSWER_SECONDS).close()
    except TimeoutError:
        return False
    return True


def say(port: int, content: bytes) -> None:
    """Say it on a connection of its own, and hang up."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(content)


@CLOSING
def test_a_group_that_has_formed_hears_no_stranger_and_goes_on() -> None:
    dice = random.Random(0)
    store = open_store("127.0.0.1")
    before = listening()
    with Forked(take_part, [(store.port,)]) as ranks:
        first = form(0, store.port, "first", store=store)
        assert ranks.take(1) == ["first"]
        opened = listening() - before
        assert opened
        assert not any(answers(port) for port in opened)
        for _ in range(CONNECTIONS):
            say(store.port, hostile.store_stream(dice))
        list(broadcasts([("first", torch.tensor([1.0, 2.0, 3.0]))], first))
        assert ranks.take(1) == [[1.0, 2.0, 3.0]]
        destroy_group(first)
        second = form(0, store.port, "second", store=store)  # at the same store
        list(broadcasts([("second", torch.tensor([4.0, 5.0, 6.0]))], second))
        assert ranks.take(2) == ["second", [4.0, 5.0, 6.0]]
        ranks.end()
    destroy_group(second)


def test_what_a_stranger_writes_to_the_store_makes_a_group_fail_by_name() -> None:
    """The store tells everybody its keys, so no secret in their names would help."""
    store = open_store("127.0.0.1")
    failures: list[str] = []

    def meet() -> None:
        try:
            form(0, store.port, "spoilt", store=store, timeout=5)
        except PublicationError as error:
            failures.append(str(error))

    meeting = threading.Thread(target=meet)
    meeting.start()
    stranger = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    while not (keys := [key for key in stranger.list_keys() if "spoilt" in key]):
        assert meeting.is_alive(), failures
    for key in keys:
        stranger.set(key.replace("/0", "/1"), b"\xff" * 40)
    meeting.join(60)
    (failure,) = failures
    assert failure.startswith("process group spoilt: rank 0 of 2 (gloo at ")
    assert f"with rank 0 at 127.0.0.1:{store.port}" in failure


class OneWeight:
    """A model of one weight."""

    def __init__(self, number: float) -> None:
        self._weight = torch.full((3,), number)

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [("w", (3,))]

    def weights(self) -> Generator[tuple[str, Tensor]]:
        yield "w", self._weight


@CLOSING
def test_the_store_of_weight_groups_is_open_only_while_one_forms() -> None:
    sender = Broadcaster(Config(), backend="gloo", dtype=torch.float32, device=torch.device("cpu"))

    def announced(version: int) -> int:
        sender.prepare(version, OneWeight(float(version)))
        return sender.announce().port

    port = announced(1)
    with Forked(take_part, [(port,)]) as ranks:
        sender.send(PublishBeginReply(group_name="first", world_size=2))
        assert ranks.take(2) == ["first", [1.0] * 3]
        assert not answers(port)
        assert announced(2) == port
        assert not answers(port)  # and the other rank knocks already
        sender.send(PublishBeginReply(group_name="second", world_size=2))
        assert ranks.take(2) == ["second", [2.0] * 3]
        assert not answers(port)
        ranks.end()
    sender.close()


@CLOSING
def test_who_is_connected_to_a_store_may_use_it_when_it_is_shut() -> None:
    store = open_store("127.0.0.1")
    connected = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    shut(store.port)
    assert not answers(store.port)
    connected.set("a", "1")
    assert store.get("a") == b"1"
    store.set("b", "2")
    assert connected.get("b") == b"2"


@CLOSING
def test_a_store_that_nobody_answers_at_is_told_of_before_the_others_give_up() -> None:
    with closed_after_forming():
        deaf = socket.create_server(("127.0.0.1", 0))
    with deaf, pytest.raises(PublicationError, match=r"no reply from 127\.0\.0\.1:\d+ .*firewall"):
        form(1, deaf.getsockname()[1], "behind a firewall", timeout=1)


@CLOSING
def test_other_sockets_and_those_of_groups_under_way_stay_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        with closed_after_forming():
            with closed_after_forming():
                inner = socket.create_server(("127.0.0.1", 0))
            store = open_for_good("127.0.0.1")
            assert answers(inner.getsockname()[1])  # the outer group may be about to form
        with inner, store:
            assert answers(before.getsockname()[1])
            assert answers(store.getsockname()[1])
            assert not answers(inner.getsockname()[1])
