"""Advantages of sibling responses, as pure tensor functions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

STD_EPS = 1e-4


def group_advantages(rewards: Tensor, *, kind: Literal["grpo", "mean"]) -> Tensor:
    """Compare each response with its siblings.

    `rewards` `[n]` are those of one group; so are the advantages, float32.

    - `grpo`: `(r - mean(r)) / (std(r) + 1e-4)` with the unbiased standard deviation
      (DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3);
    - `mean`: `r - mean(r)` (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Siblings that all scored the same get exactly 0: they teach nothing.
    """
    rewards = rewards.float()
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if kind == "mean":
        return centred
    return centred / (rewards.std() + STD_EPS)
