"""Layers with a mixture of experts, made of Megatron's modules: the choice of a token's experts, and their ranks.

Each rank of a pipeline stage holds some of the experts, whole, and receives the tokens for them from the other ranks
(Megatron's all-to-all dispatcher). Tensor-parallel ranks, which hold different parts of a matrix in other layers,
compute different tokens here.

The router's choice may be replayed, as on the torch backend (`trainer/backends/experts.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn.functional import linear, pad

from streamrl.device import to_device
from streamrl.trainer.backends.context import Share
from streamrl.trainer.backends.experts import AddLoss, balancing_loss
from streamrl.types import NO_EXPERT


def facts_of(share: Share, *, counted: bool, replayed: bool, device: torch.device) -> Tensor:
    """Return `[rows, length, 1 + layers · top_k]` uint8: facts about each token for layers with experts. The first is 1
    if the token counts for its experts' load. The others are the experts that compute it, `NO_EXPERT` where the router
    chooses. Without `replayed` the router always chooses, and only the first fact is present."""
    real = (share.real & counted).astype(np.uint8)[..., None]
    experts = share.micro.routed_experts if replayed else None
    return to_device(real if experts is None else np.concatenate([real, experts], -1), device)


class ReplayingRouter(Router):  # type: ignore[misc]
    """Router that chooses the `top_k` experts with the largest weights; shares and loss as in `experts.SparseMlp`."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config, pg_collection)
        self.balance = 0.0
        """Factor of a token's load-balancing loss in training."""
        self.load: Tensor | None = None
        """`[experts]`: how often each was chosen in training since this was None."""

    def forward(self, tokens: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' shares and whether they were chosen, `[tokens, experts]`, from `[tokens, hidden]` and the
        tokens' `facts_of`."""
        # tensor ranks have different tokens; the gradients are summed over them
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group)
        return self.routing(linear(tokens.float(), weight.float()), facts)

    def routing(self, scores: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `forward`, from the scores `[tokens, experts]`."""
        probabilities = scores.softmax(-1)
        chosen = self._chosen(probabilities, facts[:, 1:])
        shares = probabilities.gather(-1, chosen)
        if not self.config.moe_router_pre_softmax:
            shares = shares / shares.sum(-1, keepdim=True)
        if torch.is_grad_enabled():  # once for each token, even if layers are computed again
            real = facts[:, 0] == 1
            load = chosen[real].flatten().bincount(minlength=self.num_experts)
            self.load = load if self.load is None else self.load + load
            if self.balance:
                loss = self.balance * len(facts) * balancing_loss(probabilities[real], load)
                shares = AddLoss.apply(shares, loss)  # type: ignore[no-untyped-call]
        spread = torch.zeros_like(probabilities)
        return spread.scatter(-1, chosen, shares), spread.bool().scatter(-1, chosen, True)

    def _chosen(self, probabilities: Tensor, replayed: Tensor) -> Tensor:
        """Return `[tokens, top_k]`; `replayed`: `[tokens, layers · top_k]`, or `[tokens, 0]`."""
        top_k = self.config.moe_router_topk
        chosen = probabilities.topk(top_k, dim=-1).indices
        if replayed.shape[1] == 0:
            return chosen
        first = (self.layer_number - 1) * top_k
        own = replayed[:, first : first + top_k].long()
        return torch.where(own == NO_EXPERT, chosen, own)


class Experts(MoELayer):  # type: ignore[misc]
    """A layer's experts, computed one matrix product after another, with Megatron's own linear layers."""

    def __init__(self, config: Any) -> None:
        feed_forward = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=feed_forward)
        super().__init__(config, MoESubmodules(experts=experts, router=ReplayingRouter))

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return `[length, rows, hidden]`, the shape of `hidden_states`. The output of `facts_of` is passed as
        Megatron's `padding_mask`, which stays with the tokens when they are computed again."""
        assert padding_mask is not None
        tokens, facts = hidden_states.flatten(0, 1), padding_mask.transpose(0, 1).flatten(0, 1)
        count, group = len(tokens), self.attn_tp_group
        if group.size() > 1:
            behind = -count % group.size()
            tokens = scatter_to_sequence_parallel_region(pad(tokens, (0, 0, 0, behind)), group=group)
            facts = pad(facts, (0, 0, 0, behind), value=NO_EXPERT).chunk(group.size())[group.rank()]
        tokens, shares = self.preprocess(tokens, *self.router(tokens, facts))
        mixed, _ = self.routed_experts_compute(*self.dispatch(tokens, shares))
        mixed = self.postprocess(self.combine(mixed), None)
        if group.size() > 1:
            mixed = gather_from_sequence_parallel_region(mixed, tensor_parallel_output_grad=False, group=group)[:count]
        return mixed.view_as(hidden_states), None
