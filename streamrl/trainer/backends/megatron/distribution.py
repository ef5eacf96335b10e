"""Log-probabilities and entropies from logits whose vocabulary is cut over the tensor ranks.

No rank ever sees all logits of a token: each sums over its own part, and the sums are added up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def token_distribution(
    logits: Tensor,
    targets: Tensor,
    *,
    first: int,
    count: int,
    temperature: float,
    entropy_gradient: bool,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """`[tokens]` float32: log-probabilities of `targets` `[tokens]`, and entropies, at `temperature`.

    `logits` `[tokens, columns]` are those of the token ids from `first`; columns from `count` on are padding,
    and take no part. The ranks of `group` hold the other ids. Without `entropy_gradient` the entropy has none.
    """
    found: tuple[Tensor, Tensor] = _Distribution.apply(  # type: ignore[no-untyped-call]
        logits, targets - first, count, temperature, entropy_gradient, group
    )
    return found


class _Distribution(torch.autograd.Function):
    """Forward exchanges a maximum and three sums for each token; backward exchanges nothing.

    With p the probabilities, H the entropy, and y the target's one-hot vector:
    d log p_y / d logits = (y - p) / T and d H / d logits = -p (log p + H) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        columns: Tensor,
        count: int,
        temperature: float,
        entropy_gradient: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        scaled = logits[:, :count].float() / temperature
        peak = scaled.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        scaled = scaled - peak[:, None]
        mine = (columns >= 0) & (columns < count)
        columns = torch.where(mine, columns, 0)
        chosen = scaled.gather(-1, columns[:, None])[:, 0] * mine
        weights = scaled.exp()
        sums = torch.stack([weights.sum(-1), torch.linalg.vecdot(weights, scaled), chosen])
        dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        entropy = total.log() - weighted / total
        ctx.save_for_backward(weights.div_(total[:, None]), entropy, columns, mine)
        ctx.settings = (logits.shape, logits.dtype, temperature, entropy_gradient)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_logprob, of_entropy = gradients
        probabilities, entropy, columns, mine = ctx.saved_tensors
        shape, dtype, temperature, entropy_gradient = ctx.settings
        found = probabilities * -of_logprob[:, None]
        found.scatter_add_(-1, columns[:, None], (of_logprob * mine)[:, None])
        if entropy_gradient:
            slope = torch.xlogy(probabilities, probabilities).add_(probabilities * entropy[:, None])
            found -= slope.mul_(of_entropy[:, None])
        gradient = probabilities.new_zeros(shape, dtype=dtype)
        gradient[:, : found.shape[1]] = found / temperature
        return gradient, None, None, None, None, None
