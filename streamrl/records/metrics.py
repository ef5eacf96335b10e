"""What a training step reports: one line of `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from streamrl.records.collapse import HEALTHY, Health

METRICS_FILE = "metrics.jsonl"
LENGTHS_KEPT = 256
"""Responses in a step whose lengths are written down."""


class StepReport(msgspec.Struct, frozen=True):
    """What one training step did; one line of `metrics.jsonl`."""

    step: int
    """The policy version that the step made."""
    time: float
    """Seconds since the epoch at the end of the step."""
    metrics: dict[str, float]
    """Scalars by name."""
    token_ages: dict[int, int]
    """Age in versions → tokens that entered the loss."""
    masked_ages: dict[int, int] = {}
    """Age in versions → sampled tokens of the batch that were too old to enter it (`over_age = "mask"`)."""
    spans: list[tuple[str, float, float]] = []
    """What the trainer did: (name, begin, end) in seconds since the epoch."""
    seqs: list[int] = []
    """The sequence numbers that were trained on."""
    health: Health = HEALTHY
    """Whether the run is about to fall apart, as far as this step's figures and those before it tell."""
    admitted_staleness: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Of a run that is slowed: the `max_staleness` by which groups are admitted from now on; None: as configured."""
    response_lengths: list[list[int]] = []
    """Sampled tokens of each sibling, of the first groups of the batch: a sample of `LENGTHS_KEPT` responses or some
    more."""

    def finite(self) -> StepReport:
        """Without the scalars that JSON cannot carry: infinities, and what is not a number."""
        return msgspec.structs.replace(self, metrics=finite(self.metrics))


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """`values` without infinities and what is not a number."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
