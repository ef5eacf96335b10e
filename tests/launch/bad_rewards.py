"""Reward functions with a fault, or without one; a process of their own imports this module, and little else."""

from __future__ import annotations

from typing import Any


def hang(response: Any, prompt: Any) -> float:
    while True:
        pass


def fail(response: Any, prompt: Any) -> float:
    raise KeyError("solution")


def level(response: Any, prompt: Any) -> float:
    return float(prompt.metadata["level"] + 100 * (response.text == prompt.answer))


def equal(response: Any, prompt: Any) -> float:
    return float(response.text == prompt.answer)


def boxed(response: Any, prompt: Any) -> float:
    return 1.0 if response.text == f"[{prompt.answer}]" else -1.0
