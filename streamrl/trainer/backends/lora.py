"""Low-rank adapters on the linear layers of a transformers model (`streamrl/lora.py` has the formula).

The layers stay in place and keep their weights; an adapted layer has two more parameters. Only these have gradients.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamrl.config import LoraConfig
from streamrl.lora import PREFIX, TENSORS, Specs, adapter_specs, check_adapter, is_adapted
from streamrl.safetensors_files import TensorFiles


class LoraLinear(nn.Linear):
    """A frozen linear layer with its adapter; the adapter's parameters are not initialized until they are loaded."""

    def __init__(self, base: nn.Linear, lora: LoraConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        place: dict[str, Any] = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Parameter(torch.empty(lora.rank, self.in_features, **place))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, lora.rank, **place))
        self.scale = lora.scale
        self.adapted = True
        """Whether the adapter is applied."""

    def forward(self, input: Tensor) -> Tensor:
        found = F.linear(input, self.weight, self.bias)
        if not self.adapted:
            return found
        # without autocast the adapter computes in float32, for any dtype of its base
        low = F.linear(input.to(self.lora_A.dtype), self.lora_A)
        return found + (F.linear(low, self.lora_B) * self.scale).to(found.dtype)


def adapt(model: nn.Module, lora: LoraConfig) -> None:
    """Freeze `model` and put an adapter on each layer of `lora.target_modules`; raises `ModelError` for a name without
    a layer."""
    adapter_specs([(name, tuple(weight.shape)) for name, weight in model.named_parameters()], lora)
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and is_adapted(f"{name}.weight", lora):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LoraLinear(module, lora))


def peft_name(parameter: str) -> str:
    """Return peft's name of a `LoraLinear`'s parameter, for example `model.layers.0.mlp.up_proj.lora_A`."""
    return f"{PREFIX}{parameter}.weight"


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Make `model` compute without its adapters within the context."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True


def first_adapter(specs: Specs, lora: LoraConfig, *, folder: Path | None, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the adapter in `folder`, whole; without a folder those of a new adapter, which changes
    nothing: A is drawn as peft draws it, and B is zero. Raises `ModelError` if the folder's adapter does not fit."""
    if folder is not None:
        check_adapter(folder, lora)
        files = TensorFiles(folder, TENSORS)
        for name in files.names():
            yield name, files.read(name)
        return
    for name, shape in specs:
        if ".lora_A." in name:
            drawn = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            whole = torch.empty(shape)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=drawn)
            yield name, whole
        else:
            yield name, torch.zeros(shape)
