"""Matrices are packed beside those who compute with them, or are not and serve as they are."""

from __future__ import annotations

import pytest
import torch

from streamrl.gserver.embedded.linear import Matrix
from streamrl.gserver.embedded.packer import Packer
from streamrl.gserver.embedded.packing import can_pack, packing_for

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no packed products")


def test_without_memory_for_one_the_others_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packing = packing_for(torch.float32, 1)  # tried with memory
    assert packing is not None
    matrices = [Matrix(torch.randn(8, 8)) for _ in range(5)]
    packer = Packer(threads=1)
    with monkeypatch.context() as patched:

        def no_memory(weight: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not enough memory")

        patched.setattr(packing, "pack", no_memory)
        packer.start(matrices)
        packer.finish()
    assert not any(matrix.packed for matrix in matrices)
    assert caplog.text.count("not enough memory") == 1
    packer.start(matrices)
    packer.finish()
    assert all(matrix.packed for matrix in matrices)
