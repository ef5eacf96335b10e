"""Low-rank adapters in the format of Hugging Face's peft: names, shapes and files.

An adapted linear layer of weight W (`[outputs, inputs]`) computes `W x + alpha / rank · B (A x)`, with A of
`[rank, inputs]` and B of `[outputs, rank]` (Hu et al. 2021, arXiv 2106.09685).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from streamrl.config import LoraConfig
from streamrl.errors import ModelError

SETTINGS = "adapter_config.json"
TENSORS = "adapter_model"
"""Name of the file with the tensors, without `.safetensors`."""
PREFIX = "base_model.model."
"""Prefix of the names of an adapter's tensors; the rest is as in the model."""

Specs = list[tuple[str, tuple[int, ...]]]
"""Name and shape of tensors."""


def pair_of(weight: str) -> tuple[str, str]:
    """Return the names of A and B for the linear layer with the weight `weight`."""
    layer = weight.removesuffix(".weight")
    return f"{PREFIX}{layer}.lora_A.weight", f"{PREFIX}{layer}.lora_B.weight"


def is_adapted(weight: str, lora: LoraConfig) -> bool:
    """Whether the layer with the weight `weight` is one of `lora.target_modules`."""
    layer, _, last = weight.rpartition(".")
    return last == "weight" and layer.rpartition(".")[2] in lora.target_modules


def adapter_specs(weights: Iterable[tuple[str, tuple[int, ...]]], lora: LoraConfig) -> Specs:
    """Return names and shapes of an adapter's tensors, A and B layer by layer; `weights`: specs of the base model.

    Raises `ModelError` if a name of `lora.target_modules` is not found.
    """
    specs: Specs = []
    found: set[str] = set()
    for weight, shape in weights:
        if is_adapted(weight, lora):
            outputs, inputs = shape
            found.add(weight.split(".")[-2])
            specs += zip(pair_of(weight), ((lora.rank, inputs), (outputs, lora.rank)), strict=True)
    if missing := sorted(set(lora.target_modules) - found):
        raise ModelError(f"model.lora.target_modules: the model has no linear layer {missing[0]}")
    return specs


def adapter_settings(lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json`; `base`: the base model's folder or name."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(lora.target_modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }


def check_adapter(folder: Path, lora: LoraConfig) -> None:
    """Raise `ModelError` unless `folder` holds an adapter with the settings `lora`."""
    file = folder / SETTINGS
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(
            f"{folder} holds no adapter ({SETTINGS}: {error.strerror}); was it trained without [model.lora], or is it "
            "not on this host?"
        ) from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    wanted = adapter_settings(lora, "")
    for name in ("peft_type", "r", "lora_alpha", "target_modules", "bias", "use_rslora"):
        value = found.get(name, wanted[name])
        if (sorted(value) if name == "target_modules" else value) != wanted[name]:
            raise ModelError(f"{file}: {name} is {value}, and [model.lora] asks for {wanted[name]}")
    if not (folder / f"{TENSORS}.safetensors").is_file():
        raise ModelError(f"{folder} lacks {TENSORS}.safetensors")
