"""The controller's records of a run: a line of `metrics.jsonl` for each training step, and `final.json` at the end. The
launcher adds how the run ended to the latter."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from streamrl.errors import UNDECODABLE
from streamrl.records.collapse import HEALTHY, Health

log = logging.getLogger(__name__)

Ending = Literal["failed", "stopped"]
METRICS_FILE = "metrics.jsonl"
FINAL_FILE = "final.json"
LENGTHS_KEPT = 256
"""Number of responses in a step for which lengths are recorded."""
TASK = "task"
"""Prefix of the figures of a task: `task/NAME/reward_mean`."""


class StepFigures(msgspec.Struct, frozen=True):
    """Results of one training step: the part of a `StepReport` that is shown."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # larger integers are not exact in a column of floats
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
    """Activities of the trainer: (name, begin, end) in seconds since the epoch."""
    health: Health = HEALTHY
    """Whether the policy is about to collapse, judged by the figures of this step and those before it."""
    response_lengths: list[list[int]] = []
    """Sampled tokens of each sibling, of the first groups of the batch: a sample of `LENGTHS_KEPT` responses or some
    more."""


class StepReport(StepFigures, frozen=True):
    """Results of one training step; one line of `metrics.jsonl`."""

    seqs: list[int] = []
    """Sequence numbers of the groups in the batch."""

    def finite(self) -> StepReport:
        """Return the report without scalars that JSON cannot represent: infinities and NaN."""
        return msgspec.structs.replace(self, metrics=finite(self.metrics))


class Final(msgspec.Struct, frozen=True, kw_only=True):
    """`final.json`: the controller's last status and its counts, in groups unless another unit is given."""

    state: str = ""
    """The run's end as its launcher saw it: `failed` or `stopped`; empty: as in `status`."""
    message: str = ""
    """The reason in one line, if there is a `state`."""
    status: dict[str, Any] | None = None
    """The last `Status` (`transport/control.py`), after all steps were reported; None: not recorded."""
    policy_version: int = 0
    train_seconds: float = 0.0
    """Seconds since the first step, without times in which the run was down."""
    groups_trained: int | None = None
    """Groups that entered a training step; None: the run ended before this and the following counts were known."""
    groups_held: int = 0
    """Groups stored with the trainer that no step used."""
    groups_duplicated: int = 0
    """Groups that arrived again after they had been stored; refused."""
    max_staleness: int = 0
    """η, in policy versions."""
    over_age: str = ""
    """Treatment of tokens older than that: `mask`, `wait` or `drop`."""
    tokens_dropped: int = 0
    """Sampled tokens of the groups that were discarded as too old."""

    @property
    def ledger(self) -> dict[str, int]:
        """The ledger's counts in `status` (`LedgerStatus`), in groups; empty if they are not recorded."""
        found = (self.status or {}).get("ledger")
        return found if isinstance(found, dict) else {}

    @property
    def ending(self) -> tuple[str, str]:
        """The state in which the run ended, and the reason in words; both are empty if unknown."""
        if self.state:
            return self.state, self.message
        status = self.status or {}
        return str(status.get("state", "")), str(status.get("message", ""))


def write_final(run_dir: Path, final: Final) -> None:
    """Write `final.json` into `run_dir`; an `OSError` is only logged, because the run's results are in other files."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / FINAL_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(final)))
    except OSError as error:
        log.error("%s cannot be written: %s", FINAL_FILE, error)


def write_ending(run_dir: Path, state: Ending, message: str, *, keep_failure: bool = False) -> None:
    """Add to `final.json` how the run ended, as the launcher of its processes saw it.

    The controller writes that file. A killed controller writes none, and the errors that survivors report may be
    consequences of the first death. `keep_failure`: a recorded failure is the cause, and stays.
    """
    try:
        final = msgspec.json.decode((run_dir / FINAL_FILE).read_bytes(), type=Final)
    except (OSError, *UNDECODABLE):
        final = Final()
    if state == "stopped" and final.ending[0] in ("finished", "stopped"):
        return  # the controller has recorded the reason
    if keep_failure and state == final.ending[0] == "failed":
        return
    write_final(run_dir, msgspec.structs.replace(final, state=state, message=message))


def seconds_between(before: StepFigures, after: StepFigures) -> float:
    """Return the time from the end of one step to the end of a later one, without times in which the run was down."""
    passed = after.time - before.time
    first, last = (step.metrics.get("run_seconds") for step in (before, after))
    if first is None or last is None:  # older versions do not record it
        return passed
    return min(passed, max(0.0, last - first))


def mean_age(token_ages: Mapping[int, float]) -> float | None:
    """Return the mean of `token_ages` (age in versions → tokens); None: there are no tokens."""
    tokens = sum(token_ages.values())
    return sum(age * count for age, count in token_ages.items()) / tokens if tokens else None


def total_ages(steps: Iterable[StepFigures]) -> dict[int, int]:
    """Return age in versions → tokens that entered the loss, over all steps."""
    found: Counter[int] = Counter()
    for step in steps:
        found.update(step.token_ages)
    return {age: count for age, count in found.items() if count}


def of_tasks(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the figures of each task by their names; empty for a run of one task."""
    found: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        prefix, _, rest = key.partition("/")
        name, _, figure = rest.partition("/")
        if prefix == TASK and figure:
            found.setdefault(name, {})[figure] = value
    return found


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return `values` without infinities and NaN."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
