"""What the sections of the configuration are made of: types of values, and how often something happens.

`Every` is every so many epochs, steps and seconds, each counted by itself: something due every ten steps and every
minute happens at the steps 10, 20, ... and besides every minute. Pure: positions and times are passed in.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
PositiveFloat = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Share = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
NonEmpty = Annotated[str, Meta(min_length=1)]
DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
SinkName = Literal["tensorboard", "wandb", "trackio"]
DataSource = Literal["reasoning_gym", "jsonl", "parquet", "hf_disk", "python"]
GENERATED_SOURCES = ("reasoning_gym", "python")
"""Sources whose rows are a function of a seed."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the configuration file."""


# --- how often ---


class Every(msgspec.Struct, frozen=True):
    """A frequency as it is written in a configuration; 0 turns one of the three off."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if min(self.epochs, self.steps, self.seconds) < 0:
            raise ValueError(f"{self}: none of the three may be below 0")

    @property
    def ever(self) -> bool:
        """Whether any of the three is on."""
        return bool(self.epochs or self.steps or self.seconds)

    def since(self, *, epoch: int, step: int, now: float) -> Frequency:
        """Count from here on: `epoch` and `step` are the whole ones that are done, `now` is in seconds."""
        return Frequency(self, epoch=epoch, step=step, now=now)


def every(*, epochs: int = 0, steps: int = 0, seconds: float = 0.0) -> Every:
    """`every(steps=10, seconds=60.0)`."""
    return Every(epochs=epochs, steps=steps, seconds=seconds)


class Frequency:
    """Says, again and again, whether it is time.

    Epochs and steps are due at their multiples, counted from the beginning of the run: a run that was resumed
    goes on in the same rhythm. Seconds are counted from the last time that they were due.
    """

    def __init__(self, every: Every, *, epoch: int, step: int, now: float) -> None:
        self._every = every
        self._epoch = epoch
        self._step = step
        self._ticked = now

    def due(self, *, epoch: int, step: int, now: float) -> bool:
        """Whether one of the three has come since the last call; positions never go back."""
        by_epochs = _passed(self._epoch, epoch, self._every.epochs)
        by_steps = _passed(self._step, step, self._every.steps)
        by_seconds = self._every.seconds > 0 and now - self._ticked >= self._every.seconds
        self._epoch, self._step = epoch, step
        if by_seconds:
            self._ticked = now
        return by_epochs or by_steps or by_seconds


def _passed(before: int, now: int, period: int) -> bool:
    """Whether a multiple of `period` lies in (before, now]."""
    return period > 0 and now // period > before // period
