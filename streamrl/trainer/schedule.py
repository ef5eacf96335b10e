"""Learning-rate schedules, assembled from torch's."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from streamrl.config import OptimizerConfig


def learning_rate_schedule(optimizer: Optimizer, config: OptimizerConfig, *, total_steps: int) -> LRScheduler:
    """Linear warm-up over `warmup_steps`, then `config.schedule` down to `min_lr_ratio` at `total_steps`."""
    rest = max(1, total_steps - config.warmup_steps)
    peak = optimizer.param_groups[0]["lr"]
    main: LRScheduler
    if config.schedule == "cosine":
        main = CosineAnnealingLR(optimizer, rest, eta_min=peak * config.min_lr_ratio)
    elif config.schedule == "linear":
        main = LinearLR(optimizer, start_factor=1.0, end_factor=max(config.min_lr_ratio, 1e-8), total_iters=rest)
    else:
        main = ConstantLR(optimizer, factor=1.0)
    if not config.warmup_steps:
        return main
    warmup = LinearLR(optimizer, start_factor=1 / (config.warmup_steps + 1), total_iters=config.warmup_steps)
    return SequentialLR(optimizer, [warmup, main], milestones=[config.warmup_steps])
