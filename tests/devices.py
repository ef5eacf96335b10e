"""Where tests marked `cuda` compute: on a CUDA device, or where `STREAMRL_TEST_DEVICE` says, to try the tests."""

from __future__ import annotations

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
