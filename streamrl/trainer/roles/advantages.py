"""Credit of each token: advantages, and target values for a critic.

Credit is assigned once for a training batch, before its first minibatch. So statistics in formulas, such as the mean
and deviation of the advantages, are over the whole batch, for any division into minibatches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamrl.config import AlgorithmConfig
from streamrl.trainer.algorithms.advantages import generalised_advantages, moments, whiten
from streamrl.trainer.algorithms.losses import kl_estimate
from streamrl.trainer.algorithms.registry import Advantage, advantage_of, is_per_token
from streamrl.trainer.roles.items import TrainItem, needed

AddUp = Callable[[Tensor], Tensor]
"""Return the sum of a vector over all ranks."""


class Credit(NamedTuple):
    """Advantages and returns of one group's tokens, each `[tokens]` and packed like the group's own arrays; 0 where not
    sampled."""

    advantages: Tensor
    returns: Tensor | None
    """Target of the critic's values; None without a critic."""


def assign_credit(
    items: Sequence[TrainItem],
    algorithm: AlgorithmConfig,
    *,
    kl_coef: float,
    given: bool,
    add_up: AddUp,
    advantage: Callable[[int], Advantage] | None = None,
) -> list[Credit]:
    """Return the credit of `items`, all of this rank's items of a batch, perhaps none.

    Collective, with the same `given` on all ranks. Advantages of tokens (`per_token`) are whitened with the mean and
    the deviation over the batch's tokens in the loss.

    `given`: the items have the user's advantages, which are used unchanged. With `kl_in = "reward"` the estimated KL
    from the reference, times `kl_coef`, is subtracted from the reward: token by token if tokens have their own
    advantages, and for the whole response otherwise. `advantage` returns the advantage for the task of a sequence
    number; None: `algorithm.advantage` for all.
    """
    if given:
        return [Credit(torch.from_numpy(needed(item.advantages, "advantages")), None) for item in items]
    penalised = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    penalties = [_divergence(item, algorithm) * kl_coef if penalised else None for item in items]
    compare = advantage_of(algorithm)
    if not is_per_token(algorithm):
        chosen = advantage or (lambda seq: compare)
        return [
            _by_response(item, chosen(item.group.seq), penalty) for item, penalty in zip(items, penalties, strict=True)
        ]
    found = [_by_token(item, algorithm, compare, penalty) for item, penalty in zip(items, penalties, strict=True)]
    in_loss = [credit.advantages[item.trainable] for credit, item in zip(found, items, strict=True)]
    batch = add_up(moments(torch.cat([torch.zeros(0), *in_loss])))
    return [
        credit._replace(advantages=whiten(credit.advantages, batch) * torch.tensor(item.group.packed_loss_mask))
        for credit, item in zip(found, items, strict=True)
    ]


def _by_response(item: TrainItem, compare: Advantage, penalty: Tensor | None) -> Credit:
    """Return the credit with one advantage for all tokens of a response."""
    group = item.group
    rewards = group.rewards.astype(np.float32)
    if penalty is not None:
        lengths = group.seqlens.tolist()
        rewards = rewards - np.array([float(part.sum()) for part in torch.split(penalty, lengths)], np.float32)
    advantages = np.repeat(compare(rewards, group.episodes.astype(np.int64)), group.seqlens)
    return Credit(torch.from_numpy(np.where(group.packed_loss_mask, advantages, np.float32(0))), None)


def _by_token(item: TrainItem, algorithm: AlgorithmConfig, compare: Advantage, penalty: Tensor | None) -> Credit:
    """Return the credit from the rewards at and after each token: the penalties, and the response's reward at its last
    token.

    With a critic by generalised advantage estimation, without one as a plain sum.
    """
    group = item.group
    sampled = torch.from_numpy(group.packed_loss_mask.copy())
    rewards = torch.zeros(group.tokens) if penalty is None else -penalty
    lasts = [np.flatnonzero(part)[-1] for part in np.split(group.packed_loss_mask, np.cumsum(group.seqlens)[:-1])]
    starts = np.cumsum(group.seqlens) - group.seqlens
    estimated = algorithm.advantage == "gae"
    earned = compare(group.rewards.astype(np.float32), group.episodes.astype(np.int64))
    rewards[torch.from_numpy(starts + np.array(lasts))] += torch.from_numpy(earned)
    values = torch.from_numpy(needed(item.values, "values")) if estimated else torch.zeros(group.tokens)
    response = torch.from_numpy(np.repeat(np.arange(group.size), group.seqlens))[sampled]
    advantages, returns = torch.zeros(group.tokens), torch.zeros(group.tokens)
    found = generalised_advantages(
        rewards[sampled],
        values[sampled],
        torch.bincount(response, minlength=group.size),
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda if estimated else 1.0,
    )
    advantages[sampled] = found
    returns[sampled] = found + values[sampled]
    return Credit(advantages, returns if estimated else None)


def _divergence(item: TrainItem, algorithm: AlgorithmConfig) -> Tensor:
    """Return `[tokens]`: the estimated KL from the reference at each sampled token, under the policy that sampled it; 0
    elsewhere."""
    group = item.group
    behavior = torch.from_numpy(group.packed_behavior_logprobs.copy())
    reference = torch.from_numpy(needed(item.ref_logprobs, "ref_logprobs"))
    kl = kl_estimate(behavior, reference, kind=algorithm.kl_estimator)
    return kl * torch.from_numpy(group.packed_loss_mask.copy())
