"""A filter of groups: those that are neither too hard nor too easy.

Try it:

    streamrl run examples/copy_scratch.toml rollout.filter=examples.hooks.filter:neither_hard_nor_easy \
        rollout.filter_args.highest=0.8
"""

from __future__ import annotations

from streamrl.types import TrajectoryGroup


def neither_hard_nor_easy(group: TrajectoryGroup, *, lowest: float = 0.0, highest: float = 0.9) -> bool:
    """Whether the group's mean reward is above `lowest` and below `highest`, so that it is trained on."""
    return lowest < float(group.rewards.mean()) < highest
