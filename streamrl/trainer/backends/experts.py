"""Mixture of experts in transformers models: the choice of the experts for a token, and the sum of their outputs.

The router chooses the experts, unless the choice of the engine's router when it sampled the tokens is known and
replayed (rollout routing replay, Ma et al. 2025, arXiv 2510.11370). In both cases the weights of the experts are the
router's, and it learns from them: only the choice, which has no gradient, is replayed.

transformers keeps the experts of a layer in two fused tensors. Here each has matrices of its own, named as in the files
of a checkpoint. So code that handles weights by name (reading, sharding, the optimizer's files, publication, adapters)
need not know about experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP, Qwen3MoeSparseMoeBlock

from streamrl.types import NO_EXPERT


class Routing(NamedTuple):
    """Inputs of a layer with experts about the tokens that it computes."""

    real: Tensor
    """`[tokens]` bool: False for padding, which does not count in any expert's load."""
    replayed: Tensor | None = None
    """`[tokens, top_k]`: the experts that compute the tokens, `NO_EXPERT` where the router chooses; None if it always
    does."""
    balance: float = 0.0
    """Factor of the load-balancing loss of these tokens."""


class SparseMlp(nn.Module):
    """A layer's experts; the `top_k` experts with the largest router weights compute each token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.routing: Routing | None = None
        """The routing of the next tokens; kept until the backward pass is complete, which may compute the layer
        again."""
        self.load: Tensor | None = None
        """`[experts]`: number of the last computed tokens that chose each expert."""
        self.top_k = config.num_experts_per_tok
        self._normalised = config.norm_topk_prob
        self.experts = nn.ModuleList(
            Qwen3MoeMLP(config, intermediate_size=config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        """The router."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `[rows, length, hidden_size]`, the shape of `hidden`."""
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
        """Return the sum of the outputs of the `chosen` experts (`[tokens, top_k]`) for `x`, times their `shares`.

        All experts compute, even with no tokens: sharded ranks need gradients of the same weights.
        """
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self.top_k
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = zip(self.experts, torch.split(x[tokens], counts), strict=True)
        computed = torch.cat([expert(part) for expert, part in parts])
        weighted = computed * shares.flatten()[order, None]
        return torch.zeros_like(x, dtype=weighted.dtype).index_add(0, tokens, weighted)


def balancing_loss(probabilities: Tensor, load: Tensor) -> Tensor:
    """Return the load-balancing loss of one layer (Fedus et al. 2021, arXiv 2101.03961, eq. 4): `top_k` if all experts
    are chosen equally often.

    `probabilities`: `[tokens, experts]`, from the router. `load`: `[experts]`, how often each was chosen.
    """
    tokens, experts = probabilities.shape
    return experts * torch.dot(load / max(1, tokens), probabilities.sum(0) / max(1, tokens))


class AddLoss(torch.autograd.Function):
    """Return the first argument; add the second, a scalar, to the differentiated loss in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


def route(model: nn.Module, real: Tensor, experts: Tensor | None = None, *, balance: float = 0.0) -> None:
    """Set the routing of the next tokens in the layers of `model`; `real` (`[rows, length]`) is False for padding.

    `experts`: `[rows, length, layers · top_k]` int64, as in `Routing`. `balance`: factor of the mean of all layers'
    load-balancing losses, which is added to the loss.
    """
    for number, mlp in sparse_layers(model).items():
        own = slice(number * mlp.top_k, (number + 1) * mlp.top_k)
        mlp.routing = Routing(
            real.flatten(),
            None if experts is None else experts[..., own].flatten(0, 1),
            balance / len(sparse_layers(model)),
        )


def sparse_layers(model: nn.Module) -> dict[int, SparseMlp]:
    """Return the layers of `model` that have experts of this kind, by their number."""
    return {
        n: mlp for n, layer in enumerate(_layers(model)) if isinstance(mlp := getattr(layer, "mlp", None), SparseMlp)
    }


def separate_experts(model: nn.Module) -> None:
    """Replace the layers that mix experts by `SparseMlp`, in a transformers model that was made without memory."""
    for layer in _layers(model):
        if isinstance(getattr(layer, "mlp", None), Qwen3MoeSparseMoeBlock):
            dtype = layer.mlp.gate.weight.dtype
            with torch.device("meta"):
                layer.mlp = SparseMlp(model.config).to(dtype)


def _layers(model: Any) -> Any:
    return getattr(model.base_model, "layers", ())
