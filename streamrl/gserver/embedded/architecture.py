"""The shape of a model, read from its Hugging Face `config.json`.

Only what the engine computes is accepted: a setting that would change the computation in another way is an error.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from streamrl.errors import ModelError
from streamrl.models import check_checkpoint, eos_token_ids, expert_count


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embedding."""

    theta: float
    kind: str = "default"
    """`default`, `linear` or `llama3`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def table(self, head_dim: int, length: int) -> Tensor:
        """Return the rotation at each of `length` positions: cosines, and sines with the sign that exchanged halves of
        a head need, `[2, length, head_dim]`, float32."""
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.inverse_frequencies(head_dim))
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return radians per position of each pair of numbers: `[head_dim / 2]`, float32."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._stretched(frequencies)
        return frequencies

    def _stretched(self, frequencies: Tensor) -> Tensor:
        """Scale as Llama 3.1 does: low frequencies are divided by `factor`, high ones stay, a ramp is in between."""
        wavelengths = 2 * math.pi / frequencies
        longest = self.original_max_position / self.low_freq_factor
        shortest = self.original_max_position / self.high_freq_factor
        ramp = (self.original_max_position / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - ramp) * frequencies / self.factor + ramp * frequencies
        stretched = torch.where(wavelengths > longest, frequencies / self.factor, frequencies)
        return torch.where((wavelengths <= longest) & (wavelengths >= shortest), between, stretched)


class Architecture(msgspec.Struct, frozen=True):
    """Everything that the forward pass needs to know besides the weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the feed-forward network of a layer without experts."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position: int
    """Number of positions that the model was made for."""
    tied: bool
    """The output head is the embedding."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    eos_token_ids: frozenset[int]
    """Tokens that end a response, from config.json and generation_config.json."""
    moe: MixtureOfExperts | None = None
    """None: no layer has experts."""


class MixtureOfExperts(msgspec.Struct, frozen=True):
    """The layers in which each token is computed by a few of many feed-forward networks."""

    layers: tuple[int, ...]
    """Which those are, ascending."""
    experts: int
    """Of each of them."""
    top_k: int
    """Experts that compute a token."""
    intermediate_size: int
    """Of one expert."""
    normalised: bool
    """The shares of a token's experts add up to one."""


def read_architecture(folder: Path) -> Architecture:
    """Read `folder/config.json`; raises `ModelError`, which names what is not supported."""
    settings = check_checkpoint(folder)
    kind = settings["model_type"]
    _refuse_unsupported(settings, folder)
    try:
        heads = settings["num_attention_heads"]
        bias = kind == "qwen2" or bool(settings.get("attention_bias"))
        return Architecture(
            vocab_size=settings["vocab_size"],
            hidden_size=settings["hidden_size"],
            intermediate_size=settings["intermediate_size"],
            layers=settings["num_hidden_layers"],
            heads=heads,
            kv_heads=settings.get("num_key_value_heads") or heads,
            head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
            rms_norm_eps=settings["rms_norm_eps"],
            rope=_read_rope(settings, folder),
            max_position=settings["max_position_embeddings"],
            tied=settings.get("tie_word_embeddings", False),
            qkv_bias=bias,
            o_bias=bias and kind != "qwen2",
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            eos_token_ids=eos_token_ids(folder),
            moe=_read_experts(settings) if kind == "qwen3_moe" else None,
        )
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks {error}") from error


def _read_experts(settings: dict[str, Any]) -> MixtureOfExperts | None:
    step, dense = settings.get("decoder_sparse_step", 1), settings.get("mlp_only_layers") or ()
    layers = tuple(i for i in range(settings["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
    if not (experts := expert_count(settings)) or not layers:
        return None
    return MixtureOfExperts(
        layers=layers,
        experts=experts,
        top_k=settings["num_experts_per_tok"],
        intermediate_size=settings["moe_intermediate_size"],
        normalised=settings.get("norm_topk_prob", False),
    )


def _refuse_unsupported(settings: dict[str, Any], folder: Path) -> None:
    problems = []
    if settings.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act = {settings['hidden_act']!r} (supported: silu)")
    if settings.get("mlp_bias"):
        problems.append("mlp_bias = true")
    if settings.get("use_sliding_window"):
        problems.append("use_sliding_window = true")
    if settings.get("quantization_config"):
        problems.append("quantized weights")
    if problems:
        raise ModelError(f"the embedded gserver cannot serve {folder}: {', '.join(problems)} is not supported")


def _read_rope(settings: dict[str, Any], folder: Path) -> Rope:
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"the embedded gserver cannot serve {folder}: rope {rope} is not supported "
            "(supported rope types: default, linear, llama3)"
        )
    return Rope(
        theta=rope.get("rope_theta") or settings.get("rope_theta") or 10000.0,
        kind=kind,
        factor=rope.get("factor", 1.0),
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 4.0),
        original_max_position=rope.get("original_max_position_embeddings", 8192),
    )
