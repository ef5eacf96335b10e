"""Building blocks of the configuration's sections: types of values, and frequencies.

`Every` means every so many epochs, steps and seconds, each counted independently: an event with a period of ten steps
and one minute is due at the steps 10, 20, ... and also every minute. Pure: positions and times are passed in.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args

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
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$")]
DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
SinkName = Literal["tensorboard", "wandb", "trackio"]
DataSource = Literal["reasoning_gym", "jsonl", "parquet", "hf_disk", "python"]
GENERATED_SOURCES = ("reasoning_gym", "python")
"""Sources that generate their rows from a seed."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the configuration file."""


@cache
def fields_of(section: type[Section]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the fields of `section` by name; msgspec evaluates their annotations each time."""
    return {field.name: field for field in msgspec.structs.fields(section)}


SectionT = TypeVar("SectionT", bound=Section)
Overrides = dict[str, Any]
"""A table with some keys of another section, whose other keys keep their values there; annotated with `keys_of`."""


def keys_of(section: type[Section]) -> Meta:
    """Return the annotation of `Overrides` with the keys of `section`."""
    return Meta(extra={"section": section})


def section_of(kind: Any) -> type[Section] | None:
    """Return the section of a field of type `kind`; of `Overrides`, the section that has their keys."""
    for each in (kind, *get_args(kind)):
        found = next((meta.extra["section"] for meta in getattr(each, "__metadata__", ()) if meta.extra), each)
        if isinstance(found, type) and issubclass(found, Section):
            return found
    return None


def overlaid(section: SectionT, overrides: Overrides) -> SectionT:
    """Return `section` with the values of `overrides`."""
    return msgspec.convert(msgspec.structs.asdict(section) | overrides, type(section))


# --- frequencies ---

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
EVERY = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>steps?|epochs?|[smhd])")
EVERY_FORM = '"100 steps", "2 epochs", "15m" (s, m, h or d), several of them with commas, or "never"'


class Every(msgspec.Struct, frozen=True):
    """A frequency; 0 turns one of the three periods off."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0

    @property
    def ever(self) -> bool:
        """Whether any of the three periods is on."""
        return bool(self.epochs or self.steps or self.seconds)

    def since(self, *, epoch: int, step: int, now: float) -> Frequency:
        """Start to count here: `epoch` and `step` are completed epochs and steps, `now` is in seconds."""
        return Frequency(self, epoch=epoch, step=step, now=now)


def every(text: str, *, key: str = "every") -> Every:
    """Return the frequency `text` in the form `EVERY_FORM`; raises `ValueError` with the name `key`."""
    periods: dict[str, float] = {}
    for part in () if text == "never" else text.split(","):
        found = EVERY.fullmatch(part.strip())
        name = {"s": "steps", "e": "epochs"}[found["unit"][0]] if found and len(found["unit"]) > 1 else "seconds"
        if not found or name in periods or ("." in found["number"] and name != "seconds"):
            raise ValueError(f"{key} = {text!r}: write it as {EVERY_FORM}")
        periods[name] = float(found["number"]) * UNIT_SECONDS.get(found["unit"], 1)
    return Every(
        epochs=int(periods.get("epochs", 0)), steps=int(periods.get("steps", 0)), seconds=periods.get("seconds", 0.0)
    )


class Frequency:
    """Determines repeatedly whether an event is due.

    Epochs and steps are due at their multiples, counted from the beginning of the run, so a resumed run keeps the
    rhythm. Seconds are counted from the last time that they were due.
    """

    def __init__(self, every: Every, *, epoch: int, step: int, now: float) -> None:
        self._every = every
        self._epoch = epoch
        self._step = step
        self._ticked = now

    def due(self, *, epoch: int, step: int, now: float) -> bool:
        """Return whether one of the three periods has passed since the last call; positions never decrease."""
        by_epochs = _passed(self._epoch, epoch, self._every.epochs)
        by_steps = _passed(self._step, step, self._every.steps)
        by_seconds = self._every.seconds > 0 and now - self._ticked >= self._every.seconds
        self._epoch, self._step = epoch, step
        if by_seconds:
            self._ticked = now
        return by_epochs or by_steps or by_seconds


def _passed(before: int, now: int, period: int) -> bool:
    """Return whether a multiple of `period` lies in (before, now]."""
    return period > 0 and now // period > before // period
