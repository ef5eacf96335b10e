"""What a training step reports, and where reports go: JSON lines and TensorBoard, those of evaluations, too.

A disk that is full or gone is reported once and does not stop the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from streamrl.records.collapse import HEALTHY, Health
from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport, scalars
from streamrl.records.files import LineFile

log = logging.getLogger(__name__)

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
    response_lengths: list[list[int]] = []
    """Sampled tokens of each sibling, of the first groups of the batch: a sample of `LENGTHS_KEPT` responses or some
    more."""

    def finite(self) -> StepReport:
        """Without the scalars that JSON cannot carry: infinities, and what is not a number."""
        return msgspec.structs.replace(self, metrics=finite(self.metrics))


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """`values` without infinities and what is not a number."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


class Sink(Protocol):
    """A place for reports. Every method may raise `OSError`."""

    def write(self, report: StepReport) -> None: ...

    def write_evaluation(self, report: EvaluationReport) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One report a line in the file of its kind, handed to the operating system before `write` returns."""

    def __init__(self, folder: Path) -> None:
        self._files = {name: LineFile(folder / name) for name in (METRICS_FILE, EVALUATIONS_FILE)}

    def write(self, report: StepReport) -> None:
        self._append(METRICS_FILE, report.finite())

    def write_evaluation(self, report: EvaluationReport) -> None:
        self._append(EVALUATIONS_FILE, report)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _append(self, name: str, report: msgspec.Struct) -> None:
        self._files[name].append(msgspec.json.encode(report))


class TensorBoard:
    """Scalars, and the share of tokens of each age."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # slow to import

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, report: StepReport) -> None:
        tokens = max(1, sum(report.token_ages.values()))
        ages = {f"token_age/{age}": count / tokens for age, count in report.token_ages.items()}
        self._add({**report.metrics, **ages}, time=report.time, step=report.step)

    def write_evaluation(self, report: EvaluationReport) -> None:
        figures = {f"evaluation/{name}": value for name, value in scalars(report).items()}
        self._add(figures, time=report.time, step=report.policy_version)

    def _add(self, figures: Mapping[str, float], *, time: float, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MetricsWriter:
    """Writes each report into `run_dir`, as JSON lines and, if wanted, for TensorBoard."""

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        self._sinks: list[Sink] = []
        try:
            self._sinks.append(JsonLines(run_dir))
            if tensorboard:
                self._sinks.append(TensorBoard(run_dir / "tensorboard"))
        except OSError as error:
            log.warning("figures cannot be written to %s (%s); the run goes on without", run_dir, error)

    def write(self, report: StepReport) -> None:
        self._to_all(lambda sink: sink.write(report), step=report.step)

    def write_evaluation(self, report: EvaluationReport) -> None:
        self._to_all(lambda sink: sink.write_evaluation(report), step=report.step)

    def _to_all(self, write: Callable[[Sink], None], *, step: int) -> None:
        for sink in tuple(self._sinks):
            try:
                write(sink)
            except OSError as error:
                self._sinks.remove(sink)
                log.warning("%s stops at step %d: %s; the run goes on", type(sink).__name__, step, error)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                log.warning("%s could not be closed: %s", type(sink).__name__, error)
        self._sinks.clear()
