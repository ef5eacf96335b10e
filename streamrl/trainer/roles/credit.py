"""How much credit each token gets: advantages, and what a critic should have said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamrl.config import AlgorithmConfig
from streamrl.trainer.algorithms.advantages import gae, group_advantages, moments, whiten, whitens
from streamrl.trainer.algorithms.kl import kl_estimate
from streamrl.trainer.roles.items import TrainItem, needed

AddUp = Callable[[Tensor], Tensor]
"""Adds a vector up over all ranks."""


class Credit(NamedTuple):
    """Of one group's tokens, each `[tokens]` and packed like the group's own arrays; 0 where not sampled."""

    advantages: Tensor
    returns: Tensor | None
    """What the critic's values should be; None without a critic."""


def assign_credit(
    items: Sequence[TrainItem], algorithm: AlgorithmConfig, *, kl_coef: float, penalised: bool, add_up: AddUp
) -> list[Credit]:
    """Credit of each item; whitened over all ranks where the algorithm says so. Collective.

    `penalised`: the estimated KL from the reference is taken from the reward, times `kl_coef`.
    """
    if items and items[0].advantages is not None:
        return [Credit(torch.from_numpy(needed(item.advantages, "advantages")), None) for item in items]
    penalties = [_divergence(item, algorithm) * kl_coef if penalised else None for item in items]
    if algorithm.advantage == "gae":
        found = [_by_gae(item, algorithm, penalty) for item, penalty in zip(items, penalties, strict=True)]
    else:
        found = [_by_response(item, algorithm, penalty) for item, penalty in zip(items, penalties, strict=True)]
    if not whitens(algorithm.advantage):
        return found
    sampled = [torch.from_numpy(item.group.packed_loss_mask.copy()) for item in items]
    if algorithm.advantage == "gae":
        counted = [credit.advantages[mask] for credit, mask in zip(found, sampled, strict=True)]
    else:
        counted = [_of_responses(item, credit.advantages) for item, credit in zip(items, found, strict=True)]
    batch = add_up(moments(torch.cat(counted) if counted else torch.zeros(0)))
    return [
        credit._replace(advantages=whiten(credit.advantages, batch).masked_fill(~mask, 0.0))
        for credit, mask in zip(found, sampled, strict=True)
    ]


def _by_response(item: TrainItem, algorithm: AlgorithmConfig, penalty: Tensor | None) -> Credit:
    """One advantage for all tokens of a response."""
    group = item.group
    rewards = torch.from_numpy(group.rewards.copy())  # received arrays are read-only
    lengths = torch.from_numpy(group.seqlens.astype(np.int64))
    if penalty is not None:
        rewards = rewards - torch.stack([part.sum() for part in torch.split(penalty, lengths.tolist())])
    if algorithm.advantage == "gae":
        raise AssertionError("advantages of tokens come from gae")
    advantages = group_advantages(rewards, kind=algorithm.advantage)
    sampled = torch.from_numpy(group.packed_loss_mask.copy())
    return Credit(advantages.repeat_interleave(lengths).masked_fill(~sampled, 0.0), None)


def _by_gae(item: TrainItem, algorithm: AlgorithmConfig, penalty: Tensor | None) -> Credit:
    """Generalised advantage estimation over the sampled tokens of each response."""
    group = item.group
    sampled = torch.from_numpy(group.packed_loss_mask.copy())
    rewards = torch.zeros(group.tokens) if penalty is None else -penalty
    lasts = [np.flatnonzero(part)[-1] for part in np.split(group.packed_loss_mask, np.cumsum(group.seqlens)[:-1])]
    starts = np.cumsum(group.seqlens) - group.seqlens
    rewards[torch.from_numpy(starts + np.array(lasts))] += torch.from_numpy(group.rewards.copy())
    values = torch.from_numpy(needed(item.values, "values"))
    response = torch.from_numpy(np.repeat(np.arange(group.size), group.seqlens))[sampled]
    advantages, returns = torch.zeros(group.tokens), torch.zeros(group.tokens)
    found = gae(
        rewards[sampled],
        values[sampled],
        torch.bincount(response, minlength=group.size),
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
    )
    advantages[sampled] = found
    returns[sampled] = found + values[sampled]
    return Credit(advantages, returns)


def _divergence(item: TrainItem, algorithm: AlgorithmConfig) -> Tensor:
    """`[tokens]`: the KL from the reference at each sampled token, as its own policy saw it; 0 elsewhere."""
    group = item.group
    behavior = torch.from_numpy(group.packed_behavior_logprobs.copy())
    reference = torch.from_numpy(needed(item.ref_logprobs, "ref_logprobs"))
    kl = kl_estimate(behavior, reference, kind=algorithm.kl_estimator)
    return kl * torch.from_numpy(group.packed_loss_mask.copy())


def _of_responses(item: TrainItem, advantages: Tensor) -> Tensor:
    """`[siblings]`: the advantage that all sampled tokens of a response share."""
    group = item.group
    parts = np.split(group.packed_loss_mask, np.cumsum(group.seqlens)[:-1])
    starts = np.cumsum(group.seqlens) - group.seqlens
    return advantages[torch.from_numpy(starts + np.array([np.flatnonzero(part)[-1] for part in parts]))]
