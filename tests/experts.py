"""Weights of transformers' models under the names that they have in a checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def as_in_files(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, named and shaped like the parameters of a transformers model, with one for each matrix of each
    expert: transformers computes with all experts of a layer in one tensor."""
    found: dict[str, Tensor] = {}
    fused: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts") or f"{prefix}.gate_up_proj_bias" in tensors:  # gpt_oss: fused in files, too
            found[name] = tensor
        elif last == "gate_up_proj":
            fused[prefix] = tensor
        else:
            gate_up = fused.pop(prefix)
            for number, (both, down) in enumerate(zip(gate_up, tensor, strict=True)):
                gate, up = both.chunk(2)
                for matrix, part in (("gate", gate), ("up", up), ("down", down)):
                    found[f"{prefix}.{number}.{matrix}_proj.weight"] = part.contiguous()
    assert not fused
    return found
