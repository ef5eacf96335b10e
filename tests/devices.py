"""Where tests marked `cuda` compute: on a CUDA device, or where `STREAMRL_TEST_DEVICE` says, to try the tests."""

from __future__ import annotations

import os

import pytest
import torch

NAME = os.environ.get("STREAMRL_TEST_DEVICE", "cuda")
DEVICE = torch.device(NAME, 0) if NAME == "cuda" else torch.device(NAME)
"""With its number, as models and engines get it in a run."""
MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own variable (2.30 and newer): several ranks may share a GPU."""
ON_DEVICE = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="this machine has no CUDA device"
    ),
]
"""The `pytestmark` of such tests."""


def nccl_ranks() -> int:
    """Return the most ranks of one NCCL group: the number of GPUs, or no limit (64) with `MULTI_RANK`."""
    if not torch.cuda.is_available():
        return 0
    shared = os.environ.get(MULTI_RANK) == "1" and torch.cuda.nccl.version() >= (2, 30)
    return 64 if shared else torch.cuda.device_count()


def needs_nccl_ranks(ranks: int) -> pytest.MarkDecorator:
    """Skip a test of NCCL where a group of `ranks` is not possible."""
    return pytest.mark.skipif(
        DEVICE.type == "cuda" and nccl_ranks() < ranks,
        reason=f"{ranks} ranks of NCCL need as many GPUs, or NCCL 2.30 or newer and {MULTI_RANK}=1",
    )


def rank_device(rank: int) -> torch.device:
    """The device of an NCCL rank; ranks share GPUs if there are too few."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if DEVICE.type == "cuda" else DEVICE
