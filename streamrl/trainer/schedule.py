"""The learning rate of each optimizer step. Pure."""

from __future__ import annotations

import math

from streamrl.config import OptimizerConfig


def learning_rate(step: int, *, peak: float, config: OptimizerConfig, total_steps: int) -> float:
    """Of optimizer step `step`, from 0: linear warm-up, then `config.schedule` down to its end at `total_steps`.

    The warm-up rises from `peak / (warmup_steps + 1)`; the end is `min_lr_ratio · peak`, and stays.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    rest = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / rest)
    match config.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1 - (1 - config.min_lr_ratio) * done)
        case "cosine":
            return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)
