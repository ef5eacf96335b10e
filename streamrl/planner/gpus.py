"""Peak rates of GPUs by name, from their makers' data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Peak rates of one GPU."""

    tflops: float
    """Dense bfloat16 matrix products with float32 sums."""
    memory_tb_s: float
    """Bandwidth of its memory."""


PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"GB200|B200", Peak(2250.0, 8.0)),
    (r"GH200", Peak(989.0, 4.0)),
    (r"H200", Peak(989.0, 4.8)),
    (r"H100 NVL", Peak(835.0, 3.9)),
    (r"H100.*PCIe", Peak(756.0, 2.0)),
    (r"H100", Peak(989.0, 3.35)),
    (r"H800", Peak(989.0, 3.35)),
    (r"H20\b", Peak(148.0, 4.0)),
    (r"A100.*80GB PCIe", Peak(312.0, 1.935)),
    (r"A100.*40GB", Peak(312.0, 1.555)),
    (r"A100|A800", Peak(312.0, 2.039)),
    (r"L40S", Peak(362.0, 0.864)),
    (r"L40\b", Peak(181.0, 0.864)),
    (r"L4\b", Peak(121.0, 0.3)),
    (r"A10\b|A10G", Peak(125.0, 0.6)),
    (r"RTX 5090", Peak(209.0, 1.79)),
    (r"RTX 4090", Peak(165.0, 1.008)),
    (r"RTX 3090", Peak(71.0, 0.936)),
)
"""The first pattern that matches a name counts."""


def peak_of(name: str) -> Peak | None:
    """Return the peak of the GPU that CUDA calls `name`; None if it is not in the list."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, name)), None)
