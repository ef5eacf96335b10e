"""Matrices are packed beside those who compute with them, or are not and serve as they are."""

from __future__ import annotations

import pytest
import torch

from streamrl.gserver.embedded import linear
from streamrl.gserver.embedded.linear import Matrix, has_packed_products
from streamrl.gserver.embedded.packer import Packer

pytestmark = pytest.mark.skipif(not has_packed_products(), reason="this torch has no packed products")


def test_without_memory_for_one_the_others_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    linear.packs_exactly(1)  # tried with memory
    matrices = [Matrix(torch.randn(8, 8)) for _ in range(5)]
    packer = Packer(threads=1)
    with monkeypatch.context() as patched:

        def no_memory(weight: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not enough memory")

        patched.setattr(linear, "_pack", no_memory)
        packer.start(matrices)
        packer.finish()
    assert not any(matrix.packed for matrix in matrices)
    assert caplog.text.count("not enough memory") == 1
    packer.start(matrices)
    packer.finish()
    assert all(matrix.packed for matrix in matrices)
