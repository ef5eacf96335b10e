"""The head: log-probabilities and entropies of the predicted tokens, from the hidden states that predict them.

Several tokens may be predicted by one state: sibling trajectories share states up to their first different token. Its
logits are computed once. The vocabulary may be cut over tensor-parallel ranks. No rank ever has all logits of a state:
each sums over its own part, and the sums are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from streamrl.device import to_device
from streamrl.trainer.backends.compiled import compiled
from streamrl.trainer.packing import MicroBatch

HEAD_CHUNK_STATES = 1024
"""Maximal number of states whose logits exist at once; more are computed chunk by chunk, and again in the backward
pass."""


class Predictions(NamedTuple):
    """The predictions of a micro-batch, on the device."""

    rows: Tensor
    columns: Tensor
    """`[states]`: places of the distinct states that predict."""
    of_state: Tensor
    """`[predicted]`: index of the state that predicts each token, in ascending order."""
    ids: Tensor
    """`[predicted]`: the predicted tokens."""
    chunks: Sequence[tuple[slice, slice]]
    """At most `HEAD_CHUNK_STATES` states each, and their predictions."""

    @classmethod
    def of(cls, micro: MicroBatch, device: torch.device) -> Predictions:
        """Return the predictions of `micro`."""
        states = micro.states()
        firsts = np.arange(0, len(states.rows), HEAD_CHUNK_STATES)
        ends = [*firsts[1:].tolist(), len(states.rows)]
        bounds = np.searchsorted(states.of_prediction, [*firsts, len(states.rows)]).tolist()
        return cls(
            to_device(states.rows, device),
            to_device(states.columns, device),
            to_device(states.of_prediction, device),
            to_device(micro.target_ids, device),
            [
                (slice(first, end), slice(low, high))
                for first, end, low, high in zip(firsts.tolist(), ends, bounds, bounds[1:], strict=False)
            ],
        )


Predict = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Return log-probabilities and entropies `[predicted]` from states `[states, hidden]`, `of_state` and `ids`."""


def in_chunks(predict: Predict, states: Tensor, predictions: Predictions) -> tuple[Tensor, Tensor]:
    """Return the output of `predict` for all `predictions`, from `states` `[states, hidden]`."""
    _, _, of_state, ids, chunks = predictions
    if len(chunks) <= 1:
        return predict(states, of_state, ids)
    parts = [
        checkpoint(
            predict,
            *(states[own], of_state[predicted] - own.start, ids[predicted]),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for own, predicted in chunks
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def token_distribution(
    logits: Tensor,
    of_state: Tensor,
    ids: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool,
    first: int = 0,
    count: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `[predicted]` float32: log-probabilities of the tokens `ids`, and entropies, at `temperature`.

    `logits` `[states, columns]` belong to the token ids from `first`; columns from `count` on are padding, and are
    ignored. `of_state`: see `Predictions`. The other ranks of `group` hold the other ids. Without `entropy_gradient`
    the entropy has no gradient.
    """
    count = logits.shape[1] if count is None else count
    found: tuple[Tensor, Tensor] = _Distribution.apply(  # type: ignore[no-untyped-call]
        logits, of_state, ids - first, count, temperature, entropy_gradient, group
    )
    return found


class _Distribution(torch.autograd.Function):
    """Log-probabilities and entropies over a vocabulary, which may be on several ranks.

    Forward exchanges a maximum and three sums; backward exchanges nothing.

    With p the probabilities, H the entropy, and y the target's one-hot vector:
    d log p_y / d logits = (y - p) / T and d H / d logits = -p (log p + H) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        of_state: Tensor,
        columns: Tensor,
        count: int,
        temperature: float,
        entropy_gradient: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        on_gpu = logits.is_cuda
        peak = (compiled(_maxima) if on_gpu else _maxima)(logits, count, temperature)
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        mine = (columns >= 0) & (columns < count)
        columns = torch.where(mine, columns, 0)
        sums_of = compiled(_sums) if on_gpu else _sums
        weights, sums = sums_of(logits, count, temperature, peak, of_state, columns, mine)
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = torch.split(sums, [len(logits), len(logits), len(of_state)])
        entropy = total.log() - weighted / total
        ctx.save_for_backward(weights, total, entropy, of_state, columns, mine)
        ctx.settings = (logits.shape, logits.dtype, temperature, entropy_gradient)
        found = chosen - total.log()[of_state], entropy[of_state]
        if not entropy_gradient:
            ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_logprob, of_entropy = gradients
        weights, total, entropy, of_state, columns, mine = ctx.saved_tensors
        shape, dtype, temperature, entropy_gradient = ctx.settings

        def by_state(gradient: Tensor) -> Tensor:
            return torch.zeros_like(entropy).index_add_(0, of_state, gradient)

        slopes = compiled(_slopes) if weights.is_cuda else _slopes
        of_entropies = by_state(of_entropy) if entropy_gradient else None
        found = slopes(weights, total, by_state(of_logprob), entropy, of_entropies)
        found.index_put_((of_state, columns), of_logprob * mine, accumulate=True)
        if temperature != 1.0:
            found = found.div_(temperature)
        if found.shape != shape:
            found = torch.nn.functional.pad(found, (0, shape[1] - found.shape[1]))
        return found.to(dtype), None, None, None, None, None, None


def _scaled(logits: Tensor, count: int, temperature: float) -> Tensor:
    scaled = logits[:, :count].float()
    return scaled if temperature == 1.0 else scaled / temperature


def _maxima(logits: Tensor, count: int, temperature: float) -> Tensor:
    """Return the largest number of each row, `[states]`."""
    return _scaled(logits, count, temperature).amax(-1)


def _sums(
    logits: Tensor, count: int, temperature: float, peak: Tensor, of_state: Tensor, columns: Tensor, mine: Tensor
) -> tuple[Tensor, Tensor]:
    """Return exp(x), `[states, count]`, with x the scaled logits minus `peak`; and the sums over its rows, those of
    x · exp(x), and the x of the `mine` among `columns`: `[states + states + predicted]`."""
    scaled = _scaled(logits, count, temperature) - peak[:, None]
    weights = scaled.exp()
    chosen = scaled[of_state, columns] * mine
    return weights, torch.cat([weights.sum(-1), torch.linalg.vecdot(weights, scaled), chosen])


def _slopes(weights: Tensor, total: Tensor, of_logprob: Tensor, entropy: Tensor, of_entropy: Tensor | None) -> Tensor:
    """Return the gradients of the logits, `[states, count]`, without the share of the chosen tokens."""
    if of_entropy is None:
        return weights * (-of_logprob / total)[:, None]
    probabilities = weights / total[:, None]
    slope = torch.xlogy(probabilities, probabilities) + probabilities * entropy[:, None]
    return probabilities * -of_logprob[:, None] - slope * of_entropy[:, None]
