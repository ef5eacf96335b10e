"""The advantages that `algorithm.advantage` names, and the advantages of tokens that are made from them.

Each of the first kind returns the advantages `[n]` of the responses to one prompt, from their rewards `[n]` and `[n]`
the number of the attempt, from 0, of each response.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STD_EPS = 1e-4

Function = TypeVar("Function", bound=Callable[..., Any])


def per_token(function: Function) -> Function:
    """Mark an advantage function: each value is the reward of a response's last token.

    A token's advantage is then the discounted sum of the rewards at and after it, KL penalties included, or with a
    critic its generalised advantage estimate. The advantages of a batch are whitened together.
    """
    function.per_token = True  # type: ignore[attr-defined]
    return function


def all_equal(rewards: NDArray[np.float32]) -> bool:
    """Whether all responses scored the same."""
    return bool((rewards == rewards[0]).all())


def means_of_attempts(values: NDArray[Any], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[attempts]`: the mean of the `values` `[n]` of each attempt."""
    means: NDArray[np.float64] = np.bincount(episodes, weights=values) / np.bincount(episodes)
    return means


def centred(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each reward minus the mean over the attempts; exactly 0 if all responses scored the same."""
    if all_equal(rewards):
        return np.zeros(len(rewards))
    deviations: NDArray[np.float64] = rewards - means_of_attempts(rewards, episodes).mean()
    return deviations


def grpo(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `(r - mean(r)) / (std(r) + 1e-4)`, with squares divided by `E - 1` (DeepSeekMath,
    https://arxiv.org/abs/2402.03300, eq. 3).

    Each of the `E` attempts counts once: its mean reward in `mean(r)`, the mean squared distance of its rewards from
    that in `std(r)`.
    """
    deviations = centred(rewards, episodes)
    squares = means_of_attempts(deviations**2, episodes)
    return deviations / (math.sqrt(squares.sum() / max(1, len(squares) - 1)) + STD_EPS)


def mean(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `r - mean(r)` (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    return centred(rewards, episodes)


def rloo(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `r` minus the mean of the *other* attempts (RLOO, https://arxiv.org/abs/2402.14740, eq. 6)."""
    if all_equal(rewards):
        return np.zeros(len(rewards))
    means = means_of_attempts(rewards, episodes)
    others = (means.sum() - means) / max(1, len(means) - 1)
    advantages: NDArray[np.float64] = rewards - others[episodes]
    return advantages


@per_token
def gae(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return `r` itself, from which `generalised_advantages` computes the advantage of each token."""
    return rewards


@per_token
def reinforce_pp(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return `r` itself (REINFORCE++, https://arxiv.org/abs/2501.03262)."""
    return rewards


@per_token
def reinforce_pp_baseline(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `r - mean(r)` (REINFORCE++, https://arxiv.org/abs/2501.03262)."""
    return centred(rewards, episodes)


@per_token
def none(rewards: NDArray[np.float32], episodes: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return zeros."""
    return np.zeros_like(rewards)


def generalised_advantages(
    rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
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
