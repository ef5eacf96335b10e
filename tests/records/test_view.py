"""The run so far: figures over restarts, resumptions and repeated steps that no viewer's own test covers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from streamrl.records.lineage import LINEAGES_FILE, Lineage
from streamrl.records.timeline import PROCESSOR_SECONDS, HeartbeatEntry
from streamrl.records.view import RunView
from tests.launch.statuses import EPOCH, step_report
from tests.runs import view_of


def beat(name: str, time: float, processor_seconds: float) -> HeartbeatEntry:
    role, index = name.split("/")
    return HeartbeatEntry(time=EPOCH + time, role=role, index=int(index), stats={PROCESSOR_SECONDS: processor_seconds})


def test_restarts_are_counted_without_those_of_a_resumed_run(tmp_path: Path) -> None:
    lineages = [Lineage(1, time=EPOCH + 50), Lineage(2, time=EPOCH + 150, cause="model_worker/0 died")]
    (tmp_path / LINEAGES_FILE).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lineages))
    run = view_of(
        tmp_path,
        beats=[
            *(beat("controller/0", time, used) for time, used in ((10, 5), (60, 1), (200, 9))),
            *(beat("gserver/0", time, used) for time, used in ((10, 5), (60, 1), (70, 0.5), (200, 9))),
            *(beat("gserver/1", time, used) for time, used in ((60, 1), (90, 0.5))),  # it joined the resumed run
            *(beat("model_worker/0", time, used) for time, used in ((100, 5), (160, 1))),
        ],
    )
    assert run.figures().restarts == {"gserver/0": 1, "gserver/1": 1, "model_worker/0": 1}
    assert {name: process.restarts for name, process in run.processes.items()} == {
        "controller/0": 1,
        "gserver/0": 2,
        "gserver/1": 1,
        "model_worker/0": 1,
    }


def test_a_step_that_the_controller_reported_is_not_read_twice(tmp_path: Path) -> None:
    run = RunView(tmp_path)
    run.add_step(step_report(1))
    run.add_step(step_report(1))
    (tmp_path / "metrics.jsonl").write_bytes(
        b"".join(msgspec.json.encode(step_report(step)) + b"\n" for step in (1, 2))
    )
    assert run.refresh()
    assert [step.step for step in run.steps] == [1, 2]
    assert run.values("groups") == [8.0, 8.0]


def test_gservers_are_not_idle_while_the_run_is_down(tmp_path: Path) -> None:
    stats = [{"busy_seconds_total": 0.5 * up, PROCESSOR_SECONDS: float(up)} for up in range(10)]
    beats = [
        HeartbeatEntry(time=begin + up, role="gserver", index=0, stats=stats[up])
        for begin in (EPOCH, EPOCH + 10_000)
        for up in range(10)
    ]
    run = view_of(tmp_path, beats=beats)
    assert run.generation_busy() == pytest.approx(0.5)
    assert run.generation_busy(since=EPOCH + 10_005) == pytest.approx(0.5)
