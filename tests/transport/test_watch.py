"""Broadcasts whose group has no deadline, watched from outside: with gloo here, for NCCL."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

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


def test_errors_of_a_weight_group_are_left_to_us_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from torch.distributed import distributed_c10d as c10d

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
