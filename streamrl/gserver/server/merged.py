"""A checkpoint and an adapter made into one checkpoint, for servers that are to know nothing of adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamrl.config import LoraConfig
from streamrl.errors import ModelError
from streamrl.lora import TENSORS, check_adapter, pair_of


def merge(base: Path, adapter: Path, lora: LoraConfig, *, into: Path) -> None:
    """Write the model in `base` with the `adapter` added, as a checkpoint in the folder `into`, which is made; each
    weight in the dtype that it has in `base`. Raises `ModelError`."""
    check_adapter(adapter, lora)
    shutil.copytree(base, into, ignore=shutil.ignore_patterns("*.safetensors"))
    try:
        pairs = load_file(adapter / f"{TENSORS}.safetensors")
        for file in sorted(base.glob("*.safetensors")):
            merged: dict[str, Tensor] = {}
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    weight = merged[name] = tensors.get_tensor(name)
                    a, b = (pairs.pop(each, None) for each in pair_of(name))
                    if a is not None and b is not None:
                        merged[name] = torch.addmm(weight.float(), b, a, alpha=lora.scale).to(weight.dtype)
            save_file(merged, into / file.name, metadata={"format": "pt"})
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"the adapter in {adapter} cannot be added to the model in {base}: {error}") from error
    if pairs:
        raise ModelError(f"the adapter in {adapter} is of another model than {base}: it has {min(pairs)}")
