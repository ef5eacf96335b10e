"""Where tests marked `cuda` compute: on a CUDA device, or where `STREAMRL_TEST_DEVICE` says, to try the tests."""

from __future__ import annotations

import os

import pytest
import torch

from streamrl.device import MULTI_RANK, nccl_ranks

NAME = os.environ.get("STREAMRL_TEST_DEVICE", "cuda")
DEVICE = torch.device(NAME, 0) if NAME == "cuda" else torch.device(NAME)
"""With its number, as models and engines get it in a run."""
ON_DEVICE = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="this machine has no CUDA device"
    ),
]
"""The `pytestmark` of such tests."""


def needs_nccl_ranks(ranks: int) -> pytest.MarkDecorator:
    """Skip a test of NCCL where a group of `ranks` is not possible."""
    most = nccl_ranks()
    return pytest.mark.skipif(
        DEVICE.type == "cuda" and most is not None and most < ranks,
        reason=f"{ranks} ranks of NCCL need as many GPUs, or NCCL 2.30 or newer and {MULTI_RANK}=1",
    )


def rank_device(rank: int) -> torch.device:
    """The device of an NCCL rank; ranks share GPUs if there are too few."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if DEVICE.type == "cuda" else DEVICE
