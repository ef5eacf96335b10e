"""Step reports on disk."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport
from streamrl.records.metrics import METRICS_FILE, Final, StepReport, write_ending, write_final
from streamrl.records.sinks import MetricsWriter
from tests.evaluations import make_report
from tests.runs import read_steps


def report(step: int, **metrics: float) -> StepReport:
    return StepReport(
        step=step,
        time=1000.0 + step,
        metrics=metrics or {"reward/mean": 0.5},
        token_ages={0: 3, 2: 1},
        spans=[("actor_train", 1.0, 2.0)],
        seqs=[step, step + 1],
    )


def write(folder: Path, *reports: StepReport) -> Path:
    writer = MetricsWriter(folder)
    for each in reports:
        writer.write(each)
    writer.close()
    return folder / METRICS_FILE


def test_reports_come_back_as_they_went(tmp_path: Path) -> None:
    write(tmp_path / "new", report(1), report(2))
    assert read_steps(tmp_path / "new") == [report(1), report(2)]


def test_each_report_is_there_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(report(1))
    assert read_steps(tmp_path) == [report(1)]
    writer.close()


def test_figures_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, report(1, loss=math.nan, ratio=math.inf, reward=1.0))
    assert read_steps(tmp_path)[0].metrics == {"reward": 1.0}


def test_evaluations_have_a_file_of_their_own_once_there_is_one(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(report(1))
    assert not (tmp_path / EVALUATIONS_FILE).exists()
    writer.write_evaluation(make_report(4, pass_at={1: 0.25, 2: 0.5}))
    lines = (tmp_path / EVALUATIONS_FILE).read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=EvaluationReport) for line in lines] == [
        make_report(4, pass_at={1: 0.25, 2: 0.5})
    ]
    writer.close()


def test_how_a_run_ended_is_added_to_what_the_controller_wrote(tmp_path: Path) -> None:
    status = {"state": "failed", "message": "controller/0: StreamRLError: it was stopped"}
    write_final(tmp_path, Final(status=status, groups_trained=5))
    write_ending(tmp_path, "failed", "model_worker/0 was killed")
    final = msgspec.json.decode((tmp_path / "final.json").read_bytes(), type=Final)
    assert final.ending == ("failed", "model_worker/0 was killed")
    assert (final.status, final.groups_trained) == (status, 5)


def test_how_a_run_ended_is_known_also_where_the_controller_wrote_nothing(tmp_path: Path) -> None:
    write_ending(tmp_path, "failed", "controller/0 was killed")
    final = msgspec.json.decode((tmp_path / "final.json").read_bytes(), type=Final)
    assert (final.ending, final.groups_trained) == (("failed", "controller/0 was killed"), None)


def test_a_controller_keeps_the_failure_that_is_recorded(tmp_path: Path) -> None:
    write_final(tmp_path, Final(status={"state": "failed", "message": "gserver/0: out of memory"}))
    write_ending(tmp_path, "failed", "StreamRLError: the run has failed: gserver/0: out of memory", keep_failure=True)
    final = msgspec.json.decode((tmp_path / "final.json").read_bytes(), type=Final)
    assert final.ending == ("failed", "gserver/0: out of memory")
    write_final(tmp_path, Final(status={"state": "running", "message": ""}))
    write_ending(tmp_path, "failed", "KeyError: 7", keep_failure=True)
    final = msgspec.json.decode((tmp_path / "final.json").read_bytes(), type=Final)
    assert final.ending == ("failed", "KeyError: 7")


def test_a_run_that_was_done_when_it_was_stopped_is_finished(tmp_path: Path) -> None:
    write_final(tmp_path, Final(status={"state": "finished", "message": "60 steps are done"}))
    write_ending(tmp_path, "stopped", "by Ctrl-C")
    final = msgspec.json.decode((tmp_path / "final.json").read_bytes(), type=Final)
    assert final.ending == ("finished", "60 steps are done")
