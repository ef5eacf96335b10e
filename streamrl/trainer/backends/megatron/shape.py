"""The facts about a model that the backend needs, from its Hugging Face checkpoint; other models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from streamrl.architecture import MODEL_TYPES, ROPE_TYPES, Architecture, read_architecture
from streamrl.errors import ModelError
from streamrl.trainer.layout import Layout


class ModelShape(Architecture, frozen=True, kw_only=True):
    """A Llama, Qwen2, Qwen3 or Qwen3-MoE model."""

    folder: Path
    inverse_frequencies: tuple[float, ...]
    """Frequencies of the rotary embedding, `head_dim / 2`."""

    @property
    def sparse(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts, in order."""
        return () if self.moe is None else self.moe.layers

    def experts_of_stage(self, stage: int, *, stages: int) -> list[int]:
        """Return the number of experts of each layer of pipeline stage `stage`."""
        each = self.layers // stages
        numbers = range(stage * each, (stage + 1) * each)
        return [0 if self.moe is None or number not in self.moe.layers else self.moe.experts for number in numbers]

    def rotation(self, positions: Tensor) -> Tensor:
        """Return `[length, rows, 1, head_dim]` float32: the angles of `positions`, `[rows, length]`."""
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=positions.device)
        angles = positions.t()[:, :, None, None].float() * frequencies
        return torch.cat([angles, angles], dim=-1)

    def check(self, layout: Layout) -> None:
        """Raise `ModelError` if the model cannot be divided by `layout`."""
        if problems := layout.obstacles(self):
            raise ModelError(f"{self.folder} cannot be trained as {layout}: {'; '.join(problems)}")


def read_shape(folder: Path) -> ModelShape:
    """Return the shape from `folder/config.json`; raises `ModelError`, which names the unsupported setting."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no configuration that transformers can read: {error}") from error
    _refuse_unsupported(config, folder)
    found = read_architecture(folder)
    frequencies = _inverse_frequencies(config, found.head_dim)
    return ModelShape(folder=folder, inverse_frequencies=frequencies, **msgspec.structs.asdict(found))


def _refuse_unsupported(config: Any, folder: Path) -> None:
    if config.model_type not in MODEL_TYPES:
        raise ModelError(
            f"the megatron backend cannot train {folder}, of type {config.model_type!r}, only "
            f'{", ".join(MODEL_TYPES)}; trainer.backend = "torch" trains any causal language model of transformers'
        )
    problems = []
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
