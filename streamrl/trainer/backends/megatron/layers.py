"""What Megatron's layers are made of.

Norms and linear layers are Transformer Engine's on a GPU where it is installed, and Megatron's own
elsewhere. Its fused norm-and-linear is left aside, so parameters have the same names either way.
Attention is ours: rows of a micro-batch are trees of siblings.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def block_modules(*, layers: int, qk_norm: bool, device: torch.device) -> Any:
    """The modules of one pipeline stage with `layers` layers on `device`; `qk_norm`: queries and keys have norms."""
    layer = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    modules = layer.submodules
    modules.self_attention.submodules.core_attention = TreeAttention
    if transformer_engine_runs_on(device):
        _take_from_transformer_engine(modules, qk_norm=qk_norm)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=modules.input_layernorm)


def transformer_engine_runs_on(device: torch.device) -> bool:
    """Whether layers on `device` are Transformer Engine's."""
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def _take_from_transformer_engine(modules: Any, *, qk_norm: bool) -> None:
    engine = TESpecProvider()
    attention, mlp = modules.self_attention.submodules, modules.mlp.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = engine.layer_norm(rms_norm=True)
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = engine.layer_norm(rms_norm=True, for_qk=True)
    attention.linear_qkv = mlp.linear_fc1 = engine.column_parallel_linear()
    attention.linear_proj = mlp.linear_fc2 = engine.row_parallel_linear()


class TreeAttention(torch.nn.Module):
    """Attention by torch's `scaled_dot_product_attention`: causal, or by the batch's mask."""

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        """`[length, rows, heads · head_dim]`, from `[length, rows, heads, head_dim]`."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if attention_mask is not None and query.shape[1] != key.shape[1]:
            # the fast kernels take either a mask or fewer key than query heads
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        mixed = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)
