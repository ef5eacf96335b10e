"""The tasks of reasoning-gym, which both make prompts (`data.py`) and score what is answered (`reward/functions.py`).

A module of its own, because each reward process imports it: what prompts are made with takes longer to import than all
that scores them.
"""

from __future__ import annotations

from typing import Any

from streamrl.errors import ConfigError


def create_reasoning_gym(task: str, *, size: int, seed: int, args: dict[str, Any]) -> Any:
    """Return the reasoning-gym data set of `task`; equal arguments give equal entries in every process.

    Raises `ConfigError` for an unknown task, or arguments that do not fit it.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError('reasoning-gym is not installed: pip install "streamrl[rewards]"') from error
    if task not in DATASETS:
        from difflib import get_close_matches

        near = get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)[:10]
        raise ConfigError(f"data.path = {task!r}: reasoning-gym has no such task; near: {', '.join(near)}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.args do not fit the reasoning-gym task {task}: {error}") from error
