"""The subset of a model's `config.json` that the engine supports, and the angles of its rotary embedding.

Any setting that would change the computation in an unsupported way is an error.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamrl import architecture
from streamrl.architecture import MODEL_TYPES, ROPE_TYPES, Architecture, Rope
from streamrl.errors import ModelError
from streamrl.models import check_checkpoint


class Unsupported(ModelError):
    """The fast engine does not compute this model."""


def read_architecture(folder: Path) -> Architecture:
    """Read `folder/config.json`; raises `Unsupported`, which names the unsupported settings, or `ModelError`."""
    settings = check_checkpoint(folder)
    if settings["model_type"] not in MODEL_TYPES:
        raise Unsupported(
            f"the fast embedded engine computes no models of type {settings['model_type']!r}, only "
            f"{', '.join(MODEL_TYPES)}"
        )
    found = architecture.read_architecture(folder)
    problems = []
    if settings.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act = {settings['hidden_act']!r} (supported: silu)")
    if settings.get("mlp_bias"):
        problems.append("mlp_bias = true")
    if settings.get("use_sliding_window"):
        problems.append("use_sliding_window = true")
    if settings.get("quantization_config"):
        problems.append("quantized weights")
    if found.rope.kind not in ROPE_TYPES:
        problems.append(f"rope {_rope_settings(settings)} (supported rope types: {', '.join(ROPE_TYPES)})")
    if problems:
        raise Unsupported(f"the fast embedded engine cannot compute {folder}: {', '.join(problems)} is not supported")
    return found


def _rope_settings(settings: dict[str, Any]) -> Any:
    return settings.get("rope_parameters") or settings.get("rope_scaling")


def rotation_table(rope: Rope, head_dim: int, length: int) -> Tensor:
    """Return the rotation at each of `length` positions: cosines, and sines with the sign for exchanged halves of a
    head, `[2, length, head_dim]`, float32."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return radians per position of each pair of numbers: `[head_dim / 2]`, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretched(rope, frequencies)
    return frequencies


def _stretched(rope: Rope, frequencies: Tensor) -> Tensor:
    """Scale as Llama 3.1 does: low frequencies are divided by `factor`, high ones stay, a ramp is in between."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    ramp = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - ramp) * frequencies / rope.factor + ramp * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), between, stretched)
