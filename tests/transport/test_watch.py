"""Broadcasts whose group has no deadline, watched from outside: with gloo here, for NCCL."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from streamrl.errors import PublicationError
from streamrl.transport.collective import NCCL_ERROR_HANDLING, broadcasts, destroy_group, form_group, open_store
from tests.forked import Forked

TIMEOUT = 20.0


def _wait_for_nothing(port: int, answers: Any) -> None:
    group = _form(port, rank=1)
    tensor = torch.zeros(4)
    began = time.monotonic()
    try:
        for _ in broadcasts([("a", tensor)], group, watched_seconds=TIMEOUT):
            answers.send(tensor.tolist())
        for _ in broadcasts([("b", tensor)], group, watched_seconds=0.5):
            answers.send("something came")
    except PublicationError as error:
        answers.send(str(error))
    answers.send(time.monotonic() - began)
    destroy_group(group)
    answers.send("left")


def _form(port: int, *, rank: int, store: Any = None) -> Any:
    return form_group(
        address="127.0.0.1", port=port, rank=rank, world_size=2, name="g", backend="gloo", timeout=TIMEOUT, store=store
    )


def test_a_broadcast_that_does_not_come_ends_by_the_watch_and_not_by_the_group() -> None:
    store = open_store("127.0.0.1")
    with Forked(_wait_for_nothing, [(store.port,)]) as others:
        group = _form(store.port, rank=0, store=store)
        for _ in broadcasts([("a", torch.ones(4))], group):
            pass
        came, error, seconds, left = others.take(4, seconds=TIMEOUT)
        assert came == [1.0] * 4
        assert error == "broadcast of b failed: nothing came within 0.5 s, and the group was aborted"
        assert 0.5 <= seconds < TIMEOUT
        assert left == "left"  # its process would end after `TIMEOUT` only, when gloo gives up
        destroy_group(group)


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
        _form(1, rank=0, store=open_store("127.0.0.1"))
    assert seen == ["0"]
    assert os.environ[NCCL_ERROR_HANDLING] == "3"
