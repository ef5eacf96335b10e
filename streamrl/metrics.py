"""What a training step reports, and where reports go: `metrics.jsonl` and TensorBoard.

A disk that is full or gone is reported once and does not stop the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


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
    spans: list[tuple[str, float, float]] = []
    """What the trainer did: (name, begin, end) in seconds since the epoch."""
    seqs: list[int] = []
    """The sequence numbers that were trained on."""

    def finite(self) -> StepReport:
        """Without the scalars that JSON cannot carry: infinities, and what is not a number."""
        return msgspec.structs.replace(self, metrics=finite(self.metrics))


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """`values` without infinities and what is not a number."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


class Sink(Protocol):
    """A place for reports. Every method may raise `OSError`."""

    def write(self, report: StepReport) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One report a line, each handed to the operating system before `write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab")
        if self._file.tell() and not _ends_with_newline(path):
            self._file.write(b"\n")  # an earlier run was cut off in the middle of a line

    def write(self, report: StepReport) -> None:
        self._file.write(msgspec.json.encode(report.finite()) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars, and the share of tokens of each age."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # slow to import

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, report: StepReport) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        tokens = max(1, sum(report.token_ages.values()))
        ages = {f"token_age/{age}": count / tokens for age, count in report.token_ages.items()}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in {**report.metrics, **ages}.items()]
        self._writer.add_event(Event(wall_time=report.time, step=report.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MetricsWriter:
    """Writes each report to `run_dir/metrics.jsonl` and, if wanted, to TensorBoard."""

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        self._sinks: list[Sink] = []
        try:
            self._sinks.append(JsonLines(run_dir / METRICS_FILE))
            if tensorboard:
                self._sinks.append(TensorBoard(run_dir / "tensorboard"))
        except OSError as error:
            log.warning("figures cannot be written to %s (%s); the run goes on without", run_dir, error)

    def write(self, report: StepReport) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.write(report)
            except OSError as error:
                self._sinks.remove(sink)
                log.warning("%s stops at step %d: %s; the run goes on", type(sink).__name__, report.step, error)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                log.warning("%s could not be closed: %s", type(sink).__name__, error)
        self._sinks.clear()


def read_metrics(path: Path) -> list[StepReport]:
    """The reports in `path`, oldest first; lines that were cut off are left out.

    A step that is there twice (the run was resumed before it) counts as it was done last.
    """
    decoder = msgspec.json.Decoder(StepReport)
    reports: dict[int, StepReport] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            report = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            log.warning("%s line %d is not a complete report and is left out", path, number)
        else:
            reports[report.step] = report
    return [reports[step] for step in sorted(reports)]


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
