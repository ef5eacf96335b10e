"""Broadcasts between processes: all arrive, in order, and a peer that is gone is told of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.errors import PublicationError
from streamrl.transport.collective import AT_ONCE, broadcasts, destroy_group, form_group, open_store
from tests.forked import forking

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
    answers.put(found)
    destroy_group(joined)


def leave(port: int, answers: Any) -> None:
    destroy_group(group(1, port))
    answers.put("left")


def test_many_at_once() -> None:
    context, store = forking(), open_store("127.0.0.1")
    answers = context.Queue()
    other = context.Process(target=receive, args=(store.port, answers))
    other.start()
    joined = group(0, store.port, store)
    begun = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal begun
        for i, size in enumerate(SIZES):
            begun = i + 1
            yield str(i), torch.full((size,), float(i))

    through = 0
    for name, _ in broadcasts(tensors(), joined):
        assert name == str(through)
        through += 1
        assert begun <= through + AT_ONCE
    assert through == len(SIZES)
    assert answers.get(timeout=60) == [(str(i), [float(i)]) for i in range(len(SIZES))]
    other.join(60)
    destroy_group(joined)


def test_a_peer_that_is_gone() -> None:
    context, store = forking(), open_store("127.0.0.1")
    answers = context.Queue()
    other = context.Process(target=leave, args=(store.port, answers))
    other.start()
    joined = group(0, store.port, store)
    assert answers.get(timeout=60) == "left"
    other.join(60)
    with pytest.raises(PublicationError, match="broadcast of a weight failed"):
        for _ in broadcasts([("a weight", torch.ones(10_000_000))] * 9, joined):
            pass
    destroy_group(joined)
