"""Reward functions that no response can be scored with; a process of their own imports this module, and little else."""

from __future__ import annotations

from typing import Any


def hang(response: Any, prompt: Any) -> float:
    while True:
        pass


def fail(response: Any, prompt: Any) -> float:
    raise KeyError("solution")
