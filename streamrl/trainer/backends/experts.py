"""Mixture of experts in transformers models: which experts compute a token, and what they add up to.

Which these are is the router's choice, or, where it is known, the choice that the engine's router made when the tokens
were sampled (rollout routing replay, Ma et al. 2025, arXiv 2510.11370). Their shares are the router's either way, and
it learns from them: only the choice, which has no gradient, is replayed.

transformers keeps the experts of a layer in two fused tensors. Here each has matrices of its own, named as in the files
of a checkpoint, so whatever knows weights by name (reading, sharding, the optimizer's files, publication, adapters)
need not know of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP, Qwen3MoeSparseMoeBlock

from streamrl.types import NO_EXPERT


class SparseMlp(nn.Module):
    """A layer's experts, of which each token is computed by the `top_k` that its router gives most weight."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.replayed: Tensor | None = None
        """`[tokens, top_k]` the experts that compute the next tokens, `NO_EXPERT` where the router chooses; None: it
        chooses for all. It stays until the backward pass is through, which may compute again."""
        self.top_k = config.num_experts_per_tok
        self._normalised = config.norm_topk_prob
        self.experts = nn.ModuleList(
            Qwen3MoeMLP(config, intermediate_size=config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        """The router."""

    def forward(self, hidden: Tensor) -> Tensor:
        """`[rows, length, hidden_size]`, as `hidden`."""
        x = hidden.flatten(0, 1)
        scores: Tensor = self.gate(x)
        probabilities = scores.softmax(-1, dtype=torch.float32)
        chosen = probabilities.topk(self.top_k, dim=-1).indices
        if self.replayed is not None:
            chosen = torch.where(self.replayed == NO_EXPERT, chosen, self.replayed)
        shares = probabilities.gather(-1, chosen)
        if self._normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return self._mixed(x, chosen, shares.to(scores.dtype)).view_as(hidden)

    def _mixed(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Add up what the `chosen` experts (`[tokens, top_k]`) make of `x`, times their `shares`.

        All experts compute, of no tokens if need be: sharded ranks have to have gradients of the same weights.
        """
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self.top_k
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = zip(self.experts, torch.split(x[tokens], counts), strict=True)
        computed = torch.cat([expert(part) for expert, part in parts])
        weighted = computed * shares.flatten()[order, None]
        return torch.zeros_like(x, dtype=weighted.dtype).index_add(0, tokens, weighted)


def replay(model: nn.Module, experts: Tensor | None) -> None:
    """Have `model` compute its next tokens with `experts` (`[rows, length, layers · top_k]`, int64); None: with those
    that its routers choose."""
    for number, layer in enumerate(_layers(model)):
        mlp = layer.mlp
        if isinstance(mlp, SparseMlp):
            own = slice(number * mlp.top_k, (number + 1) * mlp.top_k)
            mlp.replayed = None if experts is None else experts[..., own].flatten(0, 1)


def separate_experts(model: nn.Module) -> None:
    """Replace the layers of a transformers model, made without memory, that mix experts by `SparseMlp`."""
    for layer in _layers(model):
        if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock):
            dtype = layer.mlp.gate.weight.dtype
            with torch.device("meta"):
                layer.mlp = SparseMlp(model.config).to(dtype)


def _layers(model: Any) -> Any:
    return model.base_model.layers
