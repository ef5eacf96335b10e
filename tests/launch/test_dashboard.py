"""The live picture: fits the terminal, and says what it should."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from streamrl.config import Config, from_dict
from streamrl.launch.dashboard import (
    StatusHistory,
    dashboard,
    duration,
    seconds_per_step,
    sparkline,
    step_line,
)
from streamrl.launch.display import Display, LiveDisplay, make_display
from streamrl.launch.local import Launcher
from streamrl.launch.processes import plan
from streamrl.planner.shapes import KNOWN
from streamrl.records import progress
from streamrl.records.collapse import Health, HealthState
from streamrl.records.health import Finding, findings
from streamrl.records.metrics import StepReport
from streamrl.records.timeline import FrequentFailure
from streamrl.records.view import RunView
from streamrl.transport import secret
from streamrl.transport.control import EvaluationStatus, EvaluationTask
from tests.evaluations import make_report
from tests.launch.statuses import history, status, step_report

CONFIG = from_dict({"run": {"name": "addition", "total_train_steps": 200}})


def drawn(picture: RenderableType, *, width: int = 100, height: int = 30) -> list[str]:
    console = Console(record=True, width=width, height=height, file=io.StringIO())
    console.print(picture)
    return console.export_text().splitlines()


def picture(
    made: tuple[RunView, StatusHistory] | None = None,
    *,
    warnings: Sequence[str] = (),
    findings: Sequence[Finding] = (),
    config: Config | None = CONFIG,
    **options: object,
) -> str:
    """The picture of a run, of `history(**options)` unless it is `made`; it fits a terminal."""
    run, seen = made or history(**options)  # type: ignore[arg-type]
    lines = drawn(dashboard(run, seen, now=12.0, config=config, warnings=warnings, findings=findings))
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    return "\n".join(lines)


@pytest.mark.parametrize("gservers", [1, 4, 20])
@pytest.mark.parametrize("warnings", [[], ["gserver/0 slow"], ["a", "b", "c", "d" * 300]])
def test_fits_100_by_30(gservers: int, warnings: list[str]) -> None:
    text = picture(gservers=gservers, warnings=warnings)
    assert "waits for 3 of 8 groups" in text, "troubled processes come first"
    assert "rollout/0" in text
    assert (" more " in text) == (gservers > 1)


def test_failed_siblings_are_counted() -> None:
    text = picture(agents={"siblings_retried_total": 40.0, "groups_shrunk_total": 7.0})
    assert "shrunk 7" in text
    assert "siblings retried 40" in text
    assert "shrunk" not in picture()


AGENTS = {
    "agent_episodes_running": 12.0,
    "agent_episodes_total": 200.0,
    "agent_calls_total": 460.0,
    "agent_turns_total": 420.0,
    "agent_trajectories_total": 220.0,
    "agent_seconds_total": 100.0,
    "agent_generation_seconds_total": 25.0,
    "agent_tokens_total": 1000.0,
    "agent_tokens_trained_total": 900.0,
    "agent_retries_total": 0.0,
}


@pytest.mark.parametrize("gservers", [1, 20])
def test_agents_have_a_line(gservers: int) -> None:
    text = picture(gservers=gservers, agents=AGENTS)
    assert "agents 12  episodes 200  calls 2.3  turns 2.1  conversations 1.10  policy 25%  trained 90%" in text
    assert "retries" not in text


def test_says_what_goes_on() -> None:
    text = picture(warnings=["gserver/0 slow"])
    for part in (
        "addition · smollm2-135m-instruct",
        "step 37/200",
        "eta 5:26",  # 163 steps of 2 s
        "450 tok/s",
        "400 tok/s",
        "busy 80%",
        "paused 5%",
        "actor_train 45%",
        "wait 20%",
        "age of tokens in versions, limit 4",
        "running 12",
        "accepted, not trained 9",  # 305 - 37 * 8
        "room 19",
        "weight update 0.31 s",
        "waits for 3 of 8 groups",
        "silent for 12 s",
        "gserver/0 slow",
    ):
        assert part in text, part


EVALUATED = EvaluationStatus(
    running=EvaluationTask(policy_version=35, step=35),
    waiting=None,
    done=4,
    left_out=0,
    last=make_report(30, newest_version=31),
)


def test_evaluations_have_a_line() -> None:
    text = picture(evaluation=EVALUATED, warnings=["a", "b"])
    assert "held-out v30  reward 0.500  pass@1 0.250  pass@4 0.600" in text
    nothing_yet = msgspec.structs.replace(EVALUATED, last=None)
    assert "held-out not evaluated yet  v35 is under way" in picture(evaluation=nothing_yet)


@pytest.mark.parametrize(
    ("run", "shown"),
    [
        ({"total_train_epochs": 4}, ("step 37  epoch 1.5/4", "eta 2:03")),  # 61.7 steps of 2 s
        ({"total_train_epochs": 4, "total_train_steps": 40}, ("step 37/40  epoch 1.5/4", "eta 0:06")),
    ],
)
def test_the_nearer_limit_of_steps_and_epochs(run: dict[str, int], shown: tuple[str, str]) -> None:
    made = history(steps=36)
    last = step_report(37)
    made[0].add_step(msgspec.structs.replace(last, metrics=last.metrics | {"epoch": 1.5}))
    made[1].add(status(12, step=37), now=12.0)
    text = picture(made, config=from_dict({"run": run}))
    for part in shown:
        assert part in text, text


def test_without_anything_yet() -> None:
    nothing, early = RunView(Path()), StatusHistory(started=0.0)
    assert "waiting for the controller" in picture((nothing, early))
    early.add(status(0, step=0, state="joining", message="1 gserver is missing"), now=0.0)
    text = picture((nothing, early))
    assert "joining: 1 gserver is missing" in text
    assert "no step yet" in text


def test_without_configuration() -> None:
    assert "step 37" in picture(config=None)


def test_restarted_gserver_does_not_count_backwards() -> None:
    _, made = history(seconds=3)
    before = made.generated_rates[-1]
    made.add(status(0), now=3.0)  # its counters began again at 0
    assert before == pytest.approx(450.0)
    assert made.generated_rates[-1] == 0.0


def test_time_in_which_the_run_was_down_is_no_steps() -> None:
    resumed = msgspec.structs.replace(step_report(2), time=step_report(2).time + 10_000)
    steps = [
        msgspec.structs.replace(step, metrics={**step.metrics, "run_seconds": 2.0 * step.step})
        for step in (step_report(1), resumed)
    ]
    assert seconds_per_step(steps) == 2.0


def test_step_line() -> None:
    line = step_line(step_report(7), steps=100)
    assert line.startswith("step 7/100  reward 0.3")
    assert "wait 0.40 s" in line
    assert "age 0.8 (max 3)" in line


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 80))
def test_sparkline_fits(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    if len(set(line)) > 1:
        assert {"▁", "█"} <= set(line)


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (187, "3:07"), (3723, "1:02:03")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def in_trouble(step: StepReport, state: HealthState = "warning") -> StepReport:
    sign = "importance ratios 0.300 away from 1 (above 0.1)"
    return msgspec.structs.replace(step, health=Health(state, 31, [sign], ["trainer.lr=1e-6 (now 2e-6)"]))


@pytest.mark.parametrize("state", ["warning", "collapsing"])
def test_the_policys_health_has_a_line(state: HealthState) -> None:
    assert "policy healthy  sample size 0.97" in picture()
    made = history()
    made[0].add_step(in_trouble(step_report(38), state))
    text = picture(made, warnings=["a", "b"])
    assert f"policy {state}  since step 31: importance ratios 0.300 away from 1 (above 0.1)" in text


def test_a_change_of_health_is_told_once_where_there_is_no_picture() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=400), config=CONFIG)
    display._show_steps(
        [step_report(36), in_trouble(step_report(37)), in_trouble(step_report(38)), step_report(39), step_report(40)]
    )
    told = [line.split("  ")[-1] for line in out.getvalue().splitlines() if "the run" in line]
    assert told == [
        "step 37: the run may be about to fall apart: importance ratios 0.300 away from 1 (above 0.1); "
        "try trainer.lr=1e-6 (now 2e-6)",
        "step 39: the run is healthy",
    ]


def test_a_resumed_run_shows_the_steps_that_it_makes_and_no_older_ones(tmp_path: Path) -> None:
    """The launcher looks before the master has taken the records back to the checkpoint."""
    out = io.StringIO()
    config = from_dict({"run": {"name": tmp_path.name, "dir": str(tmp_path.parent)}})
    metrics = tmp_path / "metrics.jsonl"
    before, again = ([step_report(step, seconds=seconds) for step in range(1, 7)] for seconds in (2.0, 3.0))
    write_lines(metrics, before)
    write_lines(tmp_path / "evaluations.jsonl", [make_report(version) for version in (2, 6)])
    display = Display(Console(file=out, width=400), config=config)
    display._take(status(1, step=0))
    progress.rewind(tmp_path, policy_version=4)
    write_lines(metrics, again[4:5])
    write_lines(tmp_path / "evaluations.jsonl", [msgspec.structs.replace(make_report(6), time=99.0)])
    display._take(status(1, step=0))
    write_lines(metrics, again[5:6])
    display._take(status(1, step=0))
    told = re.findall(r"step (\d)/100 .*  step (\d\.\d)", out.getvalue())
    assert told == [("5", "3.0"), ("6", "3.0")]
    assert [out.getvalue().count(f"evaluation of v{version}") for version in (2, 6)] == [0, 1]
    assert [step.time for step in display._run.steps] == [step.time for step in (*before[:4], *again[4:])]


def write_lines(file: Path, records: Sequence[msgspec.Struct]) -> None:
    with file.open("ab") as opened:
        opened.writelines(msgspec.json.encode(record) + b"\n" for record in records)


def without_contrast(step: StepReport) -> StepReport:
    return msgspec.structs.replace(step, metrics=step.metrics | {"groups_with_contrast": 0.0})


def test_the_worst_finding_is_beside_the_last_warning() -> None:
    run, seen = history(steps=20)
    for step in range(21, 45):
        run.add_step(without_contrast(step_report(step)))
    figures = run.figures()
    figures.disk_free, figures.disk_bytes = 2**20, 2**40
    found = findings(figures)
    assert [finding.topic for finding in found][:2] == ["disk", "contrast"]
    text = picture((run, seen), warnings=["a", "gserver/0 slow"], findings=found)
    assert "0.0 GiB are free where the run writes" in text
    assert "gserver/0 slow" in text


def display_of(folder: Path, out: io.StringIO) -> Display:
    config = from_dict({"run": {"name": folder.name, "dir": str(folder.parent)}})
    return Display(Console(file=out, width=400), config=config)


def test_the_failures_of_processes_are_those_of_the_last_status(tmp_path: Path) -> None:
    """The timeline of a controller on another machine may not be here."""
    display = display_of(tmp_path, io.StringIO())
    last = status(1)
    stats = {"groups_done_total": 95.0, "groups_rejected_total": 5.0}
    failure = FrequentFailure("KeyError: 'x'", 5, "row 4 (seq 7)")
    processes = [
        msgspec.structs.replace(process, stats=stats, failure=failure) if process.role == "rollout" else process
        for process in last.processes
    ]
    display._take(msgspec.structs.replace(last, processes=processes))
    assert "5% of the groups were given up (5): most often KeyError: 'x' (5 times, first for row 4 (seq 7))" in [
        finding.text for finding in display._findings()
    ]


def test_the_status_of_a_run_has_its_model() -> None:
    made = StatusHistory(started=0.0)
    architecture = KNOWN["Qwen3-30B-A3B"]
    made.add(msgspec.structs.replace(status(0), model=architecture), now=0.0)
    text = "\n".join(drawn(dashboard(RunView(Path()), made, now=1.0, height=60), height=60))
    assert "48 layers of width 2048, 32 heads (4 for keys and values), vocabulary 151936, 128 experts" in text


def test_the_last_warnings_of_all_logs_are_in_the_picture(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "gserver-0.log").write_text("00:00:00 ERROR   gserver/0 is said of an earlier start of the run\n")
    old = time.time() - 3600
    os.utime(logs / "gserver-0.log", (old, old))
    config = from_dict({"run": {"name": tmp_path.name, "dir": str(tmp_path.parent)}})
    display = LiveDisplay(Console(file=io.StringIO()), config=config)
    assert display._recent_warnings() == []
    now = time.strftime("%H:%M:%S")
    with (logs / "gserver-0.log").open("a") as log:
        log.write(f"{now} INFO    gserver/0 ready\n{now} WARNING gserver/0 slow\nTraceback WARNING\n")
    (logs / "rollout-0.log").write_text(f"{now} ERROR   rollout/0 RewardError: no\n")
    assert sorted(display._recent_warnings()) == ["gserver/0 slow", "rollout/0 RewardError: no"]


def test_a_finding_is_told_once_where_there_is_no_picture(tmp_path: Path) -> None:
    out = io.StringIO()
    display = display_of(tmp_path, out)
    for step in range(1, 31):
        write_lines(tmp_path / "metrics.jsonl", [without_contrast(step_report(step))])
        display._take(status(1, step=0))
    told = [line for line in out.getvalue().splitlines() if "all siblings scored the same" in line]
    assert len(told) == 1
    assert "step 5: in 100% of the groups" in told[0]


@pytest.mark.parametrize(("terminal", "kind"), [("xterm", LiveDisplay), ("dumb", Display)])
def test_a_picture_is_only_where_it_can_be_drawn_anew(terminal: str, kind: type[Display]) -> None:
    console = Console(force_terminal=True, file=io.StringIO(), _environ={"TERM": terminal})
    assert type(make_display(console, config=CONFIG)) is kind


def test_an_end_by_force_gives_the_terminal_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a second Ctrl-C, after which nothing else of the launcher runs."""
    monkeypatch.setattr(secret, "_held", [])
    out = io.StringIO()
    console = Console(force_terminal=True, file=out, _environ={"TERM": "xterm"})
    display = LiveDisplay(console, config=CONFIG)
    launcher = Launcher(CONFIG, processes=plan(CONFIG), display=display)
    hide, show = "\x1b[?25l", "\x1b[?25h"
    with display:
        assert hide in out.getvalue()
        launcher.kill()
        assert out.getvalue().rindex(show) > out.getvalue().rindex(hide)
