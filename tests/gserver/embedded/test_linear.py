"""A matrix is multiplied with as it is, or as it was packed."""

from __future__ import annotations

import logging

import pytest
import torch

from streamrl.gserver.embedded.linear import Matrix, packs
from streamrl.gserver.embedded.packing import OneDNN, can_pack

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no packed products")


@pytest.mark.skipif(not OneDNN().can(torch.float32), reason="this torch has no oneDNN")
def test_packed_copies_are_used_and_forgotten() -> None:
    weight, x = torch.randn(64, 32), torch.randn(8, 32)
    matrix = Matrix(weight)
    matrix.pack(OneDNN())
    before = matrix(x)
    weight.zero_()
    assert torch.equal(matrix(x), before)  # nothing says that the weights have changed: this is the packed copy's
    matrix.unpack()
    assert not matrix(x).any()
    matrix.pack(OneDNN())
    assert not matrix(x).any()


@needs_packing
def test_what_is_packed() -> None:
    assert packs(numbers=1000, dtype=torch.float32, device=CPU)
    assert packs(numbers=1000, dtype=torch.bfloat16, device=CPU) == can_pack(torch.bfloat16)
    assert not packs(numbers=1000, dtype=torch.float16, device=CPU)
    assert not packs(numbers=1000, dtype=torch.float32, device=torch.device("cuda"))


@needs_packing
def test_a_host_with_little_memory_packs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not packs(numbers=10**15, dtype=torch.float32, device=CPU)
    assert "7450580.6 GiB" in caplog.text
