"""Advantages of responses and of tokens, as pure tensor functions."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

STD_EPS = 1e-4

AdvantageKind = Literal["grpo", "mean", "rloo", "reinforce++", "reinforce++-baseline", "gae", "none"]
PER_TOKEN = ("reinforce++", "reinforce++-baseline", "gae", "none")
"""Kinds in which each token has its own advantage. The advantages of a batch are whitened together."""


def group_advantages(rewards: Tensor, *, kind: AdvantageKind, episodes: Tensor | None = None) -> Tensor:
    """Compare each response with its siblings.

    `rewards` `[n]` belong to one group; so do the returned advantages, float32. `episodes` `[n]` (int64, counted from
    0) assigns each trajectory to an attempt at the prompt. Each of the `E` attempts counts once: its mean reward in
    `mean(r)`, the mean squared distance of its rewards from that in `std(r)`.

    - `grpo`: `(r - mean(r)) / (std(r) + 1e-4)`, with squares divided by `E - 1` (DeepSeekMath,
      https://arxiv.org/abs/2402.03300, eq. 3);
    - `mean`: `r - mean(r)` (Dr. GRPO, https://arxiv.org/abs/2503.20783);
    - `rloo`: `r` minus the mean of the *other* attempts (RLOO, https://arxiv.org/abs/2402.14740, eq. 6);
    - `reinforce++`: `r` itself; `reinforce++-baseline`: as `mean` (REINFORCE++, https://arxiv.org/abs/2501.03262). Both
      are credited to the last token, see `PER_TOKEN`;
    - `gae`: `r` itself, since a critic takes the place of the siblings;
    - `none`: 0. Only the KL penalty that is subtracted from rewards teaches.

    Advantages of compared siblings are exactly 0 where all scored the same.
    """
    rewards = rewards.float()
    if kind in ("reinforce++", "gae"):
        return rewards
    if kind == "none" or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    if episodes is None:
        episodes = torch.arange(len(rewards))
    of_episodes = _means(rewards, episodes)
    attempts = len(of_episodes)
    centred = rewards - of_episodes.mean()
    match kind:
        case "grpo":
            variance = _means(centred**2, episodes).sum() / (attempts - 1)
            return centred / (variance.sqrt() + STD_EPS)
        case "rloo":
            others = (of_episodes.sum() - of_episodes) / (attempts - 1)
            return rewards - others[episodes]
        case _:
            return centred


def _means(rewards: Tensor, episodes: Tensor) -> Tensor:
    """Return `[episodes]`: the mean of the `rewards` of each."""
    return rewards.new_zeros(int(episodes[-1]) + 1).index_add(0, episodes, rewards) / episodes.bincount()


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Return generalised advantage estimates (Schulman et al., https://arxiv.org/abs/1506.02438, eq. 11 to 16):

        δ_t = r_t + γ · V_{t+1} - V_t,        A_t = δ_t + γ · λ · A_{t+1}

    with V and A 0 after a response's last token. `rewards` and `values` `[tokens]` belong to the sampled tokens of all
    responses, one response after another; `lengths` `[responses]` (int64) has the number of tokens of each. `values[t]`
    belongs to the state in which token t was sampled. The advantages `[tokens]` plus the values are the returns that a
    critic learns. With values of 0 and λ = 1 they are the discounted rewards that follow: A_t = Σ_k γ^k · r_{t+k}.
    """
    advantages = torch.zeros_like(values)
    ends = lengths.cumsum(0)
    following = torch.zeros(len(lengths), dtype=values.dtype)
    next_value = torch.zeros_like(following)
    for back in range(1, int(lengths.max()) + 1 if len(lengths) else 0):
        alive = lengths >= back
        at = ends[alive] - back
        delta = rewards[at] + gamma * next_value[alive] - values[at]
        advantages[at] = delta + gamma * gae_lambda * following[alive]
        following[alive] = advantages[at]
        next_value[alive] = values[at]
    return advantages


def moments(advantages: Tensor) -> Tensor:
    """Return `[3]` float64: the count of the advantages, their sum, and the sum of their squares; moments of several
    ranks add up."""
    values = advantages.double()
    return torch.stack([torch.tensor(float(len(values)), dtype=torch.float64), values.sum(), (values**2).sum()])


def whiten(advantages: Tensor, batch_moments: Tensor) -> Tensor:
    """Return `(A - mean) / (std + 1e-4)` with mean and (unbiased) deviation of a whole batch, given its `moments`.

    A batch without tokens has mean and deviation 0.
    """
    count, total, squares = map(float, batch_moments)
    mean = total / max(1.0, count)
    variance = max(0.0, squares - count * mean**2) / max(1.0, count - 1)
    return (advantages - mean) / (math.sqrt(variance) + STD_EPS)
