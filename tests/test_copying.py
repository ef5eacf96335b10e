"""Copies of many tensors at the same time: all are made, in bounded number, and errors come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from streamrl.safetensors_files import THREADS, Copiers

MANY = 50


def test_all_are_copied_and_few_are_taken_ahead() -> None:
    taken, copied, ahead = 0, 0, 0
    lock = threading.Lock()

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal taken, ahead
        for number in range(MANY):
            taken += 1
            ahead = max(ahead, taken - copied)
            yield str(number), torch.tensor(number)

    def copy(name: str, tensor: Tensor) -> int:
        nonlocal copied
        with lock:
            copied += 1
        return int(tensor) + int(name)

    assert Copiers().each(copy, weights()) == {str(number): 2 * number for number in range(MANY)}
    assert ahead <= THREADS + 2


def test_an_error_is_raised_when_nothing_is_copied_any_more() -> None:
    copying = threading.Semaphore(THREADS)

    def copy(name: str, _: Tensor) -> None:
        with copying:
            if name == "3":
                raise ValueError("no third")

    with pytest.raises(ValueError, match="no third"):
        Copiers().each(copy, ((str(number), torch.tensor(number)) for number in range(MANY)))
    assert all(copying.acquire(blocking=False) for _ in range(THREADS))
