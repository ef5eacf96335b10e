"""Lets Megatron Core 0.16 compute on the CPU, with gloo, where there is no CUDA; else does nothing.

Megatron asks `torch.cuda` for the current device, writes `device="cuda"` into its calls and
compares names of tensor types. Functions of `torch.cuda`, which could only raise here, are replaced
once; calls of torch proper are turned to the CPU only inside `as_cuda()`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_installed = False


def install() -> None:
    """Replace what megatron needs of `torch.cuda`; safe to call again."""
    global _installed
    if torch.cuda.is_available() or _installed:
        return
    _installed = True
    for name, replacement in _REPLACEMENTS.items():
        setattr(torch.cuda, name, replacement)
    _keep_random_state_on_cpu()


def as_cuda() -> AbstractContextManager[Any]:
    """While it is entered, calls that name CUDA use the CPU. Enter it around every call of megatron."""
    return nullcontext() if torch.cuda.is_available() else _CpuInPlaceOfCuda()


class _CpuInPlaceOfCuda(TorchFunctionMode):
    """Turns torch calls on CUDA into calls on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:  # the schedules and the embedding move small tensors
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the optimizers accept parameters by the name of their type, "torch.cuda.FloatTensor"
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device")).startswith("cuda"):  # buffers of the gradient norm and of the schedules
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _cpu(*_: Any) -> torch.device:
    return torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    return None


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "current_device": _cpu,  # buffers are made on "the current device"
    "synchronize": _nothing,  # after each exchange between pipeline stages
    "empty_cache": _nothing,
}


def _keep_random_state_on_cpu() -> None:
    """Recomputing activations saves and restores the generator's state; here it is the CPU's."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
