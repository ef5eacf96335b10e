"""Layers that mix experts, of Megatron's modules: which experts compute a token, and on which ranks.

Each rank of a pipeline stage has some of the experts, whole, and gets the tokens of the other ranks that are for them
(Megatron's all-to-all dispatcher). Ranks that hold different parts of a matrix elsewhere (tensor parallelism) compute
different tokens here.

The router's choice may be made for it, as on the torch backend (`trainer/backends/experts.py`).
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
    """`[rows, length, 1 + layers · top_k]` uint8: what layers with experts are told of each token. First whether it is
    1, a token that counts for its experts' load, then the experts that compute it, `NO_EXPERT` where the router
    chooses. Without `replayed` it always does, and there is nothing behind the first."""
    real = (share.real & counted).astype(np.uint8)[..., None]
    experts = share.micro.routed_experts if replayed else None
    return to_device(real if experts is None else np.concatenate([real, experts], -1), device)


class ReplayingRouter(Router):  # type: ignore[misc]
    """Chooses the `top_k` experts that get most weight; shares and loss are those of `experts.SparseMlp`."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config, pg_collection)
        self.balance = 0.0
        """What the load-balancing loss of a token is multiplied by in training."""
        self.load: Tensor | None = None
        """`[experts]` how often each was chosen in training since this was None."""

    def forward(self, tokens: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' shares and whether they were chosen, `[tokens, experts]`, from `[tokens, hidden]` and what
        `facts_of` says of them."""
        # each tensor rank has other tokens, whose gradients are summed
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group)
        return self.routing(linear(tokens.float(), weight.float()), facts)

    def routing(self, scores: Tensor, facts: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, from `[tokens, experts]`."""
        probabilities = scores.softmax(-1)
        chosen = self._chosen(probabilities, facts[:, 1:])
        shares = probabilities.gather(-1, chosen)
        if not self.config.moe_router_pre_softmax:
            shares = shares / shares.sum(-1, keepdim=True)
        if torch.is_grad_enabled():  # once for each token, also where layers are computed again
            real = facts[:, 0] == 1
            load = chosen[real].flatten().bincount(minlength=self.num_experts)
            self.load = load if self.load is None else self.load + load
            if self.balance:
                loss = self.balance * len(facts) * balancing_loss(probabilities[real], load)
                shares = AddLoss.apply(shares, loss)  # type: ignore[no-untyped-call]
        spread = torch.zeros_like(probabilities)
        return spread.scatter(-1, chosen, shares), spread.bool().scatter(-1, chosen, True)

    def _chosen(self, probabilities: Tensor, replayed: Tensor) -> Tensor:
        """`[tokens, top_k]`; `replayed`: `[tokens, layers · top_k]`, or `[tokens, 0]`."""
        top_k = self.config.moe_router_topk
        chosen = probabilities.topk(top_k, dim=-1).indices
        if replayed.shape[1] == 0:
            return chosen
        first = (self.layer_number - 1) * top_k
        own = replayed[:, first : first + top_k].long()
        return torch.where(own == NO_EXPERT, chosen, own)


class Experts(MoELayer):  # type: ignore[misc]
    """A layer's experts, one product after another, of Megatron's own linear layers."""

    def __init__(self, config: Any) -> None:
        feed_forward = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=feed_forward)
        super().__init__(config, MoESubmodules(experts=experts, router=ReplayingRouter))

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """`[length, rows, hidden]`, as `hidden_states`. What `facts_of` gives comes as Megatron's `padding_mask`: that
        goes with the tokens when they are computed again."""
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
