"""What a run leaves in its folder, read back: steps, evaluations, heartbeats, publications, the end.

| file | written by | holds |
|---|---|---|
| `config.toml` | launcher | the resolved configuration |
| `metrics.jsonl` | master | one `StepReport` a line |
| `evaluations.jsonl` | master | one `EvaluationReport` a line |
| `timeline.jsonl` | manager | one `TimelineEntry` a line: heartbeats, weight updates (`kind` = `publication`) |
| `final.json` | master | `Final`: the manager's last word, and the master's own counts |

Tolerant by purpose: a run that crashed is read as far as it got, torn lines are skipped.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.evaluation import EVALUATIONS_FILE, EvaluationReport
from streamrl.metrics import StepReport
from streamrl.transport.control.status import Status

log = logging.getLogger(__name__)

Line = TypeVar("Line")


class TimelineEntry(msgspec.Struct, frozen=True):
    """A line of `timeline.jsonl`."""

    time: float
    """Seconds since the epoch."""
    kind: str = "heartbeat"
    role: str = ""
    index: int = 0
    stats: dict[str, Any] = {}
    waiting_for: str = ""


class Final(msgspec.Struct, frozen=True):
    """`final.json`: how the run stood when it ended. Counts are in groups."""

    status: Status | None
    """The manager's last word, after the master settled everything; None if it did not answer."""
    groups_trained: int
    """Groups that entered a training step."""
    groups_held: int
    """Groups stored with the trainer that no step used."""
    groups_duplicated: int = 0
    """Groups that arrived again after they had been stored; refused."""


class Records(msgspec.Struct, frozen=True):
    """All that is readable in a run folder."""

    config: Config | None
    steps: list[StepReport]
    """In order, the last word on each step."""
    evaluations: list[EvaluationReport]
    """By policy version, the last word on each."""
    heartbeats: dict[str, list[TimelineEntry]]
    """`role/index` → its heartbeats in order of time."""
    publications: list[TimelineEntry]
    final: Final | None


def read_records(run_dir: Path) -> Records:
    """Read what there is; what is missing is empty or None."""
    steps = {step.step: step for step in _lines(run_dir / "metrics.jsonl", StepReport)}
    evaluations = {e.policy_version: e for e in _lines(run_dir / EVALUATIONS_FILE, EvaluationReport)}
    heartbeats: dict[str, list[TimelineEntry]] = {}
    publications = []
    for entry in sorted(_lines(run_dir / "timeline.jsonl", TimelineEntry), key=lambda entry: entry.time):
        if entry.kind == "publication":
            publications.append(entry)
        else:
            heartbeats.setdefault(f"{entry.role}/{entry.index}", []).append(entry)
    return Records(
        config=_config(run_dir / "config.toml"),
        steps=[steps[number] for number in sorted(steps)],
        evaluations=[evaluations[version] for version in sorted(evaluations)],
        heartbeats=heartbeats,
        publications=publications,
        final=_final(run_dir / "final.json"),
    )


def _lines(file: Path, kind: type[Line]) -> list[Line]:
    decoder = msgspec.json.Decoder(kind)
    found: list[Line] = []
    unreadable = 0
    for line in _read(file).splitlines():
        try:
            found.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            unreadable += 1
    if unreadable:
        log.warning("%s: %d lines cannot be read and are left out", file, unreadable)
    return found


def _final(file: Path) -> Final | None:
    content = _read(file)
    if not content:
        return None
    try:
        return msgspec.json.decode(content, type=Final)
    except msgspec.DecodeError as error:
        log.warning("%s cannot be read and is left out: %s", file, error)
        return None


def _config(file: Path) -> Config | None:
    if not file.exists():
        return None
    try:
        return configuration.load(file)
    except ConfigError as error:
        log.warning("the run's configuration is left out: %s", error)
        return None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""
