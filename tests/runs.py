"""Made-up run folders, to report on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config import from_dict, to_toml
from streamrl.records.metrics import StepReport
from streamrl.records.timeline import HeartbeatEntry, PublicationEntry
from streamrl.records.view import RunView
from streamrl.transport.control import LedgerStatus
from tests.launch.statuses import EPOCH, status, step_report


def write_run(
    folder: Path, *, steps: int = 60, gservers: int = 2, seconds: float = 2.0, plots: bool = True, **final: Any
) -> Path:
    """A healthy run that finished; `final` replaces entries of `final.json`. `plots`: whether a report draws them, for
    which it takes most of its time."""
    folder.mkdir(parents=True)
    config = from_dict({"run": {"name": folder.name}, "metrics": {"plots": plots}})
    (folder / "config.toml").write_text(to_toml(config))
    reports = [step_report(step, seconds=seconds) for step in range(1, steps + 1)]
    write_steps(folder, reports)
    write_lines(folder / "timeline.jsonl", heartbeats(steps * seconds, gservers=gservers))
    ledger = LedgerStatus(steps, 4, steps * 8 + 30, steps * 8 + 13, steps * 8, 12, 3, 2, 1, 4, 0, given_up=1)
    last = msgspec.structs.replace(status(0, state="finished", message="all steps are done"), ledger=ledger)
    content = {"status": last, "groups_trained": steps * 8, "groups_held": 13, "groups_duplicated": 5} | final
    (folder / "final.json").write_bytes(msgspec.json.encode(content))
    return folder


def heartbeats(seconds: float, *, gservers: int) -> list[dict[str, Any]]:
    chance = random.Random(1)
    lines: list[dict[str, Any]] = []
    busy = paused = tokens = 0.0
    for second in range(int(seconds) + 1):
        for index in range(gservers):
            stats = {
                "tokens_generated_total": tokens,
                "busy_seconds_total": busy,
                "pause_seconds_total": paused,
                "running": 12.0,
                "queued": 1.0,
            }
            lines.append(beat(second, "gserver", index, stats=stats))
        share = chance.choice([1.0, 1.0, 0.9, 0.6])
        busy, paused, tokens = busy + share * 0.97, paused + 0.03, tokens + 420 * share
        lines.append(beat(second, "controller", 0, stats={}, waiting_for="3 groups"))
        if second % 2:
            time = float(EPOCH + second)
            entry = PublicationEntry(
                time=time, begin=time - 0.3, end=time, pause=0.03, version=second // 2, done=True, error=""
            )
            lines.append(msgspec.to_builtins(entry))
    return lines


def beat(second: float, role: str, index: int, *, stats: dict[str, float], waiting_for: str = "") -> dict[str, Any]:
    """A line of the timeline, `second` after `EPOCH`."""
    time = float(EPOCH + second)
    entry = HeartbeatEntry(time=time, role=role, index=index, stats=stats, waiting_for=waiting_for)
    found: dict[str, Any] = msgspec.to_builtins(entry)
    return found


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_steps(folder: Path, steps: Sequence[StepReport]) -> None:
    write_lines(folder / "metrics.jsonl", [msgspec.to_builtins(step, str_keys=True) for step in steps])


def add_beats(folder: Path, beats: Sequence[HeartbeatEntry]) -> None:
    """Have the timeline end with `beats`."""
    with (folder / "timeline.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(beat) + b"\n" for beat in beats)


def read_steps(folder: Path) -> list[StepReport]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [msgspec.json.decode(line, type=StepReport) for line in lines]


def interrupt(folder: Path, *, after: int, down: float) -> None:
    """Have the run, whose steps took two seconds each, be down for `down` seconds after step `after`."""
    steps = [
        msgspec.structs.replace(
            step,
            time=step.time + (down if step.step > after else 0.0),
            metrics={**step.metrics, "run_seconds": 2.0 * step.step},
        )
        for step in read_steps(folder)
    ]
    write_steps(folder, steps)


def view_of(
    folder: Path,
    *,
    steps: Sequence[StepReport] = (),
    beats: Sequence[HeartbeatEntry] = (),
    publications: Sequence[PublicationEntry] = (),
) -> RunView:
    """A run with these records, which are not written as JSON first: they may have infinite figures."""
    run = RunView(folder)
    for step in steps:
        run.add_step(step)
    run.publications += publications
    for beat in beats:
        run.add_heartbeats([beat])
    return run
