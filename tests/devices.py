"""Where tests marked `cuda` compute: on a CUDA device, or where `STREAMRL_TEST_DEVICE` says, to try the tests."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

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
MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own variable (2.30 and newer): several ranks of a group may share a GPU."""


def nccl_version() -> tuple[int, int, int]:
    """Return the version of the loaded NCCL; `torch.cuda.nccl.version` returns the one that torch was built with."""
    found = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):  # linked into torch
        built_with: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        major, minor, patch, *_ = built_with
        return major, minor, patch
    return found.value // 10000, found.value // 100 % 100, found.value % 100


def nccl_ranks() -> int | None:
    """Return the maximum number of ranks of an NCCL group on this machine; None: no limit (`MULTI_RANK`)."""
    if not torch.cuda.is_available():
        return 0
    if os.environ.get(MULTI_RANK) == "1" and nccl_version() >= (2, 30):
        return None
    return torch.cuda.device_count()


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
