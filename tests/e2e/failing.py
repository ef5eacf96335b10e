"""Rewards for whole runs whose infrastructure fails now and then."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

from streamrl.rollout.reward.functions import Response
from streamrl.rollout.tasks import copy_reward
from streamrl.types import Prompt

_chance = random.Random()
_calls: Counter[int] = Counter()


def now_and_then(response: Response, prompt: Prompt, *, folder: str) -> float:
    """One call in twenty fails: most raise, some lose their process. Each is noted in `folder`."""
    if _chance.random() < 0.05:
        _note(folder, f"failure-{os.getpid()}-{time.monotonic_ns()}")
        if _chance.random() < 0.2:
            os._exit(7)
        raise ConnectionError("the sandbox is gone")
    return copy_reward(response, prompt)


def first_call_then_block(response: Response, prompt: Prompt, *, folder: str, siblings: int) -> float:
    """The first call of the run fails; the retry of that sibling takes until there is a file `go`."""
    _calls[prompt.seq] += 1
    first, blocked = Path(folder, "first"), Path(folder, "blocked")
    try:
        first.touch(exist_ok=False)
    except FileExistsError:
        if _calls[prompt.seq] > siblings:  # the others of its group have been scored
            blocked.write_text(f"{os.getppid()} {prompt.seq}\n")
            while not Path(folder, "go").exists():
                time.sleep(0.05)
        return copy_reward(response, prompt)
    raise ConnectionError("the sandbox is gone")


def _note(folder: str, name: str) -> None:
    Path(folder, name).touch()
