"""Compilation for GPUs: one kernel in place of many that each read and write all numbers.

A decoder layer in torch's eager mode spends as long in casts, norms and rotations as in matrix products. Its attention
is left out, because `TreeMask` chooses and compiles that (`attention.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from streamrl.trainer.backends.attention import TREE_ATTENTION

log = logging.getLogger(__name__)

MOST_VERSIONS = 32
"""Compiled versions of one function: layers of different kinds, each with and without gradients."""


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled for tensors of all lengths."""
    return torch.compile(function, dynamic=True)


def compile_layers(layers: Sequence[nn.Module], trial: Callable[[], object]) -> bool:
    """Compile the forward passes of `layers`, and run `trial`; if it fails, leave them as they were and log why.

    Layers of one kind share what is compiled. Return whether they are compiled.
    """
    log.info("compiling the decoder layers, which takes up to a minute if no earlier run has left compiled code")
    began = time.monotonic()
    _leave_attention_out()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VERSIONS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    try:
        trial()
    except Exception as error:  # whatever the compiler, or the code that it makes, raises
        for layer in layers:
            del layer.forward
        reason = " ".join(str(error).split()) or "no reason given"  # its first line often names the compiler alone
        name = type(error).__name__
        log.warning("layers are computed as they are, which is slower: %s: %.400s", name, reason)
        return False
    log.info("compiled the decoder layers in %.0f s", time.monotonic() - began)
    return True


@cache
def _leave_attention_out() -> None:
    attention = AttentionInterface()[TREE_ATTENTION]
    AttentionInterface.register(TREE_ATTENTION, torch.compiler.disable(attention))  # type: ignore[no-untyped-call]
