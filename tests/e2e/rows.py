"""Data for whole runs."""

from __future__ import annotations

from typing import Any

from streamrl.rollout.tasks import copy_digits


def long_ones_last(index: int, seed: int) -> dict[str, Any]:
    """Rows from the eighth on are longer than the examples allow."""
    return copy_digits(index, seed) if index < 8 else copy_digits(index, seed, digits=40)
