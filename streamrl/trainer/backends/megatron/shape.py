"""What the backend needs to know of a model, from its Hugging Face checkpoint; refuses the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from streamrl.errors import ModelError
from streamrl.models import MODEL_TYPES
from streamrl.trainer.layout import Layout

ROPE_TYPES = ("default", "linear", "llama3")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A Llama, Qwen2, Qwen3 or Qwen3-MoE model."""

    folder: Path
    vocabulary: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied: bool
    """The output head is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    inverse_frequencies: tuple[float, ...]
    """Frequencies of the rotary embedding, `head_dim / 2`."""
    sparse: tuple[int, ...] = ()
    """The numbers of the layers that have experts, in order."""
    experts: int = 0
    """How many experts such a layer has."""
    experts_per_token: int = 0
    expert_size: int = 0
    """As `intermediate_size`, of one expert."""
    normalised: bool = True
    """Whether the shares of the experts that compute a token add up to 1."""

    def experts_of_stage(self, stage: int, *, stages: int) -> list[int]:
        """Return how many experts each layer of pipeline stage `stage` has."""
        each = self.layers // stages
        return [self.experts if number in self.sparse else 0 for number in range(stage * each, (stage + 1) * each)]

    def rotation(self, positions: Tensor) -> Tensor:
        """`[length, rows, 1, head_dim]` float32: the angles of `positions`, `[rows, length]`."""
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=positions.device)
        angles = positions.t()[:, :, None, None].float() * frequencies
        return torch.cat([angles, angles], dim=-1)

    def check(self, layout: Layout) -> None:
        """Raise `ModelError` if the model cannot be cut as `layout` says."""
        problems = [
            f"{name} = {count} is no multiple of tensor = {layout.tensor}"
            for name, count in (
                ("num_attention_heads", self.heads),
                ("num_key_value_heads", self.kv_heads),
                ("intermediate_size", self.intermediate_size),
            )
            if count % layout.tensor
        ]
        if self.layers % layout.pipeline:
            problems.append(f"num_hidden_layers = {self.layers} is no multiple of pipeline = {layout.pipeline}")
        rows = -(-self.vocabulary // layout.tensor)
        if rows * (layout.tensor - 1) >= self.vocabulary:
            problems.append(f"vocab_size = {self.vocabulary} is too small for tensor = {layout.tensor}")
        if layout.expert > 1 and not self.sparse:
            problems.append(f"expert = {layout.expert}, and it has no experts")
        elif self.sparse and self.experts % layout.expert:
            problems.append(f"num_experts = {self.experts} is no multiple of expert = {layout.expert}")
        if layout.stage % layout.expert:
            problems.append(f"expert = {layout.expert} does not divide data × context × tensor = {layout.stage}")
        if problems:
            raise ModelError(f"{self.folder} cannot be trained as {layout}: {'; '.join(problems)}")


def read_shape(folder: Path) -> ModelShape:
    """From `folder/config.json`; raises `ModelError` with what is not supported."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no configuration that transformers can read: {error}") from error
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    _refuse_unsupported(config, folder)
    return ModelShape(
        folder=folder,
        vocabulary=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type in ("qwen3", "qwen3_moe"),
        inverse_frequencies=_inverse_frequencies(config, head_dim),
        **(_of_experts(config) if config.model_type == "qwen3_moe" else {}),
    )


def _of_experts(config: Any) -> dict[str, Any]:
    """The fields of `ModelShape` that models without experts lack."""
    sparse = tuple(
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    )
    return {
        "sparse": sparse,
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "expert_size": config.moe_intermediate_size,
        "normalised": bool(config.norm_topk_prob),
    }


def _refuse_unsupported(config: Any, folder: Path) -> None:
    problems = []
    if config.model_type not in MODEL_TYPES:
        problems.append(f"model_type = {config.model_type!r} (supported: {', '.join(MODEL_TYPES)})")
    if config.hidden_act != "silu":
        problems.append(f"hidden_act = {config.hidden_act!r} (supported: silu)")
    problems += [
        f"{key} = true" for key in ("attention_bias", "mlp_bias", "use_sliding_window") if getattr(config, key, False)
    ]
    if getattr(config, "attention_dropout", 0.0):
        problems.append(f"attention_dropout = {config.attention_dropout}")
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"rope {rope} (supported rope types: {', '.join(ROPE_TYPES)})")
    if problems:
        raise ModelError(f"the megatron backend cannot train {folder}: {', '.join(problems)} is not supported")


def _inverse_frequencies(config: Any, head_dim: int) -> tuple[float, ...]:
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return tuple(frequencies.tolist())
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return tuple((1.0 / config.rope_parameters["rope_theta"] ** exponents).tolist())
