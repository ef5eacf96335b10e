"""A schedule of the learning rate: constant, then a linear decay in the last part of the run.

Try it:

    streamrl run examples/copy_scratch.toml trainer.optimizer.schedule=examples.hooks.schedule:stable_then_decay
"""

from __future__ import annotations


def stable_then_decay(update: int, total_updates: int, *, decay_share: float = 0.2) -> float:
    """Return the learning rate as a share of `trainer.lr`, after `update` of `total_updates` optimizer steps."""
    left = max(0.0, 1 - update / max(1, total_updates))
    return min(1.0, left / decay_share)
