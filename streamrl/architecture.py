"""Model architecture: shape and settings, from a Hugging Face `config.json`. Pure.

This is the only description of a model: the embedded engine computes by it, and the planner counts by it. Both may
reject unsupported settings. This module reads every setting that a Llama, Qwen2, Qwen3 or Qwen3-MoE model may have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import ModelError
from streamrl.models import expert_count

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Types whose architecture this module reads: those of the fast embedded engine, of Megatron and of the planner."""
ROPE_TYPES = ("default", "linear", "llama3")


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embedding."""

    theta: float
    kind: str = "default"
    """One of `ROPE_TYPES`; other kinds are read, but not supported."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class MixtureOfExperts(msgspec.Struct, frozen=True):
    """The layers in which each token is computed by a few of many feed-forward networks."""

    layers: tuple[int, ...]
    """Indices of the layers with experts, ascending."""
    experts: int
    """Number of experts in each of these layers."""
    top_k: int
    """Number of experts that compute a token."""
    intermediate_size: int
    """Width of one expert."""
    normalised: bool
    """Whether the weights of a token's experts add up to one."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """All parameters of the forward pass except the weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward network of a layer without experts."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position: int
    """Number of positions that the model supports."""
    tied: bool
    """Whether the output head shares the embedding's weights."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    moe: MixtureOfExperts | None = None
    """None: no layer has experts."""
    exact: bool = True
    """Whether the other fields describe the whole model; otherwise its type is not in `MODEL_TYPES`."""

    def __str__(self) -> str:
        """Return a description such as `30 layers of width 576, 9 heads (3 for keys and values), vocabulary 49152`."""
        text = (
            f"{self.layers} layers of width {self.hidden_size}, {self.heads} heads ({self.kv_heads} for keys and "
            f"values), vocabulary {self.vocab_size}"
        )
        return text if self.moe is None else f"{text}, {self.moe.experts} experts ({self.moe.top_k} for each token)"


def read_architecture(folder: Path, *, any_type: bool = False) -> Architecture:
    """Read `folder/config.json`; raises `ModelError` that names a missing or unsupported setting.

    `any_type`: also return an approximate description of a model whose type is not in `MODEL_TYPES`.
    """
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    try:
        if any_type and settings.get("model_type") not in MODEL_TYPES:
            return _approximate(settings.get("text_config", settings))
        return architecture_of(settings)
    except KeyError as error:
        raise ModelError(f"{file} lacks {error}") from error
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error


def architecture_of(settings: Mapping[str, Any]) -> Architecture:
    """Return the architecture for `settings`, the content of a `config.json`; raises `KeyError` for a missing one."""
    kind = settings["model_type"]
    if kind not in MODEL_TYPES:
        raise ModelError(f"the shape of a model of type {kind!r} is not known here; known: {', '.join(MODEL_TYPES)}")
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
        rope=_rope_of(settings),
        max_position=settings["max_position_embeddings"],
        tied=bool(settings.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        o_bias=bias and kind != "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        moe=_experts_of(settings) if kind == "qwen3_moe" else None,
    )


def _approximate(settings: Mapping[str, Any]) -> Architecture:
    """Return a description from the most common settings of language models; 0 for a missing number."""

    def first(*keys: str) -> int:
        return next((settings[key] for key in keys if isinstance(settings.get(key), int)), 0)

    heads, hidden = first("num_attention_heads", "n_head"), first("hidden_size", "n_embd", "d_model")
    return Architecture(
        vocab_size=first("vocab_size"),
        hidden_size=hidden,
        intermediate_size=first("intermediate_size", "n_inner", "ffn_dim"),
        layers=first("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=first("num_key_value_heads") or heads,
        head_dim=first("head_dim") or hidden // max(1, heads),
        rms_norm_eps=0.0,
        rope=Rope(theta=0.0),
        max_position=first("max_position_embeddings", "n_positions"),
        tied=bool(settings.get("tie_word_embeddings", False)),
        qkv_bias=False,
        o_bias=False,
        qk_norm=False,
        exact=False,
    )


def _experts_of(settings: Mapping[str, Any]) -> MixtureOfExperts | None:
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


def _rope_of(settings: Mapping[str, Any]) -> Rope:
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        kind = "partial"
    return Rope(
        theta=rope.get("rope_theta") or settings.get("rope_theta") or 10000.0,
        kind=kind,
        factor=rope.get("factor", 1.0),
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 4.0),
        original_max_position=rope.get("original_max_position_embeddings", 8192),
    )
