"""Mixture of experts in transformers models: which experts compute a token, and what they add up to.

Which these are is the router's choice, or, where it is known, the choice that the engine's router made when the tokens
were sampled (rollout routing replay, Ma et al. 2025, arXiv 2510.11370). Their shares are the router's either way, and
it learns from them: only the choice, which has no gradient, is replayed.

transformers keeps the experts of a layer in two fused tensors. Here each has matrices of its own, named as in the files
of a checkpoint, so whatever knows weights by name (reading, sharding, the optimizer's files, publication, adapters)
need not know of experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP, Qwen3MoeSparseMoeBlock

from streamrl.types import NO_EXPERT


class Routing(NamedTuple):
    """What a layer with experts is told of the tokens that it computes."""

    real: Tensor
    """`[tokens]` bool: False for padding, which counts for no expert's load."""
    replayed: Tensor | None = None
    """`[tokens, top_k]` the experts that compute them, `NO_EXPERT` where the router chooses; None: it always does."""
    balance: float = 0.0
    """What the load-balancing loss of these tokens is multiplied by."""


class SparseMlp(nn.Module):
    """A layer's experts, of which each token is computed by the `top_k` that its router gives most weight."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.routing: Routing | None = None
        """The routing of the next tokens; it stays until the backward pass is through, which may compute again."""
        self.load: Tensor | None = None
        """`[experts]` how often each was chosen by the tokens that were computed last."""
        self.top_k = config.num_experts_per_tok
        self._normalised = config.norm_topk_prob
        self.experts = nn.ModuleList(
            Qwen3MoeMLP(config, intermediate_size=config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        """The router."""

    def forward(self, hidden: Tensor) -> Tensor:
        """`[rows, length, hidden_size]`, as `hidden`."""
        routing = self.routing
        assert routing is not None, "`route` comes first"
        x = hidden.flatten(0, 1)
        scores: Tensor = self.gate(x)
        probabilities = scores.softmax(-1, dtype=torch.float32)
        chosen = probabilities.topk(self.top_k, dim=-1).indices
        if routing.replayed is not None:
            chosen = torch.where(routing.replayed == NO_EXPERT, chosen, routing.replayed)
        self.load = chosen[routing.real].flatten().bincount(minlength=len(self.experts))
        shares = probabilities.gather(-1, chosen)
        if self._normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        if routing.balance:
            loss = routing.balance * balancing_loss(probabilities[routing.real], self.load)
            shares = AddLoss.apply(shares, loss)  # type: ignore[no-untyped-call]
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


def balancing_loss(probabilities: Tensor, load: Tensor) -> Tensor:
    """Return the load-balancing loss of one layer (Fedus et al. 2021, arXiv 2101.03961, eq. 4): `top_k` where all
    experts are chosen equally often.

    `probabilities`: `[tokens, experts]`, the router's. `load`: `[experts]`, how often each was chosen.
    """
    tokens, experts = probabilities.shape
    return experts * torch.dot(load / max(1, tokens), probabilities.sum(0) / max(1, tokens))


class AddLoss(torch.autograd.Function):
    """Gives the first argument, and in the backward pass adds the second, a scalar, to what is differentiated."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


def route(model: nn.Module, real: Tensor, experts: Tensor | None = None, *, balance: float = 0.0) -> None:
    """Tell the layers of `model` of the next tokens, of which `real` ones (`[rows, length]`) are no padding.

    `experts`: `[rows, length, layers · top_k]` int64, as in `Routing`. `balance`: what the mean of all layers'
    load-balancing losses is multiplied by; it is added to the loss.
    """
    for number, mlp in sparse_layers(model).items():
        own = slice(number * mlp.top_k, (number + 1) * mlp.top_k)
        mlp.routing = Routing(
            real.flatten(),
            None if experts is None else experts[..., own].flatten(0, 1),
            balance / len(sparse_layers(model)),
        )


def sparse_layers(model: nn.Module) -> dict[int, SparseMlp]:
    """Return those of `model`'s layers that have experts, by their number."""
    return {number: layer.mlp for number, layer in enumerate(_layers(model)) if isinstance(layer.mlp, SparseMlp)}


def separate_experts(model: nn.Module) -> None:
    """Replace the layers of a transformers model, made without memory, that mix experts by `SparseMlp`."""
    for layer in _layers(model):
        if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock):
            dtype = layer.mlp.gate.weight.dtype
            with torch.device("meta"):
                layer.mlp = SparseMlp(model.config).to(dtype)


def _layers(model: Any) -> Any:
    return model.base_model.layers
