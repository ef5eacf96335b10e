"""The report of a run: figures, plots, and what it makes of broken folders."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from streamrl.records.collapse import HEALTHY, Health
from streamrl.records.timeline import FrequentFailure, HeartbeatEntry
from streamrl.records.view import read_run
from streamrl.report.plots import _draw_throughput
from streamrl.report.summary import Summary, evaluation_table, summary_table, write_report
from tests.evaluations import make_report
from tests.launch.statuses import EPOCH
from tests.runs import add_beats, interrupt, read_steps, write_lines, write_run, write_steps

PLOTS = {"reward.png", "staleness.png", "throughput.png", "timeline.png"}


def test_time_in_which_the_run_was_down_does_not_count(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", plots=False)
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for step in lines[30:]:
        step["time"] += 1000
    lines[-1]["metrics"]["run_seconds"] = 121.5
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert write_report(folder).train_seconds == 121.5


def test_what_a_kill_lost_counts_in_the_generated_tokens_and_in_their_time(tmp_path: Path) -> None:
    """Steps of two seconds; after the fifth, the last in a checkpoint, the run goes on for five seconds, is killed, and
    goes on from there 100 seconds later."""
    folder = write_run(tmp_path / "run", steps=10)
    interrupt(folder, after=5, down=105.0)
    begun_anew = 115
    beats = [
        HeartbeatEntry(
            time=EPOCH + at + second, role="gserver", index=index, stats={"tokens_generated_total": 35.0 * second}
        )
        for at, last in ((0, 15), (begun_anew, 10))
        for second in range(last + 1)
        for index in range(2)
    ]
    write_lines(folder / "timeline.jsonl", [msgspec.to_builtins(beat) for beat in beats])
    summary = write_report(folder)
    assert summary.tokens_generated == 70 * (15 + 10)
    assert summary.tokens_generated_per_second == pytest.approx(70.0)


def test_figures_of_a_healthy_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    summary = write_report(folder)
    steps = read_steps(folder)
    assert summary.state == "finished"
    assert summary.steps == 60
    assert summary.reward_first == pytest.approx(sum(s.metrics["reward_mean"] for s in steps[:6]) / 6)
    assert summary.reward_final == pytest.approx(sum(s.metrics["reward_mean"] for s in steps[-6:]) / 6)
    assert summary.train_seconds == pytest.approx(120.0)
    assert summary.groups_trained == 480
    assert summary.groups_lost == 0  # 510 given out = 2 rejected + 12 running + 3 returned + 480 + 13
    assert summary.groups_duplicated == 5
    assert summary.groups_rejected == 2
    assert summary.groups_given_up == 1
    assert summary.oldest_token_age == 3  # no token of age 4 in the made-up steps
    assert summary.max_staleness == 4
    assert summary.over_age == "mask"
    assert summary.masked_share == pytest.approx(40 / 840)
    assert summary.tokens_trained == 48_000
    assert 2 * 420 * 120 * 0.6 < summary.tokens_generated <= 2 * 420 * 120
    assert summary.trainer_wait_share == pytest.approx(0.2)
    assert summary.overhead_share == pytest.approx(0.01)
    assert summary.generation_busy_share is not None
    assert 0.58 < summary.generation_busy_share < 0.97
    assert json.loads((folder / "summary.json").read_text())["groups_lost"] == 0
    assert {file.name for file in (folder / "plots").iterdir()} == PLOTS


@pytest.mark.parametrize(("held", "lost"), [(13, 0), (10, 3), (14, -1)])
def test_lost_and_doubled_groups_are_seen(tmp_path: Path, held: int, lost: int) -> None:
    assert write_report(write_run(tmp_path / "run", steps=3, plots=False, groups_held=held)).groups_lost == lost


@pytest.mark.parametrize("missing", ["config.toml", "metrics.jsonl", "timeline.jsonl", "final.json"])
def test_missing_files(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    (folder / missing).unlink()
    summary = write_report(folder)
    assert summary.steps == (0 if missing == "metrics.jsonl" else 4)
    assert (summary.groups_lost is None) == (missing == "final.json")
    assert (summary.max_staleness is None) == (missing == "config.toml")
    assert (summary.tokens_generated == 0) == (missing == "timeline.jsonl")


def test_torn_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10)
    for name in ("metrics.jsonl", "timeline.jsonl", "final.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-20])
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes() + b"\n\xff\xfe\x00 no\n")
    (folder / "config.toml").write_text("run = [")
    summary = write_report(folder)
    assert summary.steps == 9
    assert summary.state == "unknown"
    assert summary.groups_trained == 72
    assert {file.name for file in (folder / "plots").iterdir()} == PLOTS


def test_how_a_run_ended_is_known_whatever_its_manager_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "final.json").write_text('{"state": "failed", "message": "no memory", "status": {"of": "a version"}}')
    final = read_run(folder).final
    assert final is not None
    assert (final.ending, final.ledger) == (("failed", "no memory"), {})
    (folder / "final.json").write_bytes(b'{"state": "\xff"}')
    assert read_run(folder).final is None


def test_run_without_a_step(tmp_path: Path) -> None:
    summary = write_report(tmp_path)
    assert summary.steps == 0
    assert summary.reward_final is None
    assert not (tmp_path / "plots").exists()
    Console(file=io.StringIO()).print(summary_table(summary))


def test_the_run_in_the_present_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_run(tmp_path / "addition", steps=0))
    assert write_report(Path()).run == "addition"


def test_stopped_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1, status=None)
    assert write_report(folder).state == "unknown"
    assert write_report(folder).steps == 1


def test_table_shows_the_figures(tmp_path: Path) -> None:
    text = printed(write_report(write_run(tmp_path / "run", plots=False)))
    for part in ("480", "lost 0, duplicated 5, rejected 2", "versions; limit 4", "0.310 s", "all steps are done"):
        assert part in text, part


def test_failed_siblings_are_in_the_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, plots=False)
    assert "siblings retried" not in printed(write_report(folder))
    stats = {"siblings_retried_total": 12.0, "groups_shrunk_total": 3.0}
    add_beats(folder, [HeartbeatEntry(time=3, role="rollout", index=index, stats=stats) for index in range(2)])
    summary = write_report(folder)
    assert (summary.siblings_retried, summary.groups_shrunk) == (24, 6)
    assert "after failures; 6 groups shrunk" in printed(summary)


def printed(summary: Summary, *more: Table) -> str:
    console = Console(record=True, width=260, file=io.StringIO())
    console.print(summary_table(summary), *more)
    return console.export_text()


def test_figures_of_agents_are_means_over_workers_and_their_restarts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, plots=False)

    def beat(time: float, index: int, episodes: int, total: float) -> HeartbeatEntry:
        stats: dict[str, float] = {"agent_episodes_total": episodes, "agent_drifted_total": episodes}
        stats |= {"agent_metric_total/tools": total, "agent_metric_count/tools": episodes}
        return HeartbeatEntry(time=time, role="rollout", index=index, stats=stats)

    # rollout/7 was started again after its third episode
    add_beats(folder, [beat(1, 7, 1, -5), beat(2, 7, 3, -9), beat(3, 7, 2, 4), beat(4, 8, 5, 10)])
    summary = write_report(folder)
    assert (summary.episodes, summary.agent_drifted) == (10, 10)
    assert summary.agent_metrics == {"tools": pytest.approx((-9 + 4 + 10) / 10)}
    assert "tools" in printed(summary)


@pytest.mark.parametrize(
    ("message", "caption"),
    [
        ("all steps are done", "all steps are done"),
        ("rollout/0: the reward failed:\nValueError: no 7", "rollout/0: the reward failed:\nValueError: no 7"),
        (
            "model_worker/0: TrainStep failed: Traceback:\n  File 'a'\n    f()\nValueError: no [7]\n",
            "model_worker/0: TrainStep failed: Traceback:\n…\nValueError: no [7]",
        ),
    ],
)
def test_of_a_traceback_the_table_shows_where_and_what(tmp_path: Path, message: str, caption: str) -> None:
    summary = msgspec.structs.replace(write_report(write_run(tmp_path / "run", plots=False)), message=message)
    shown = [line.strip() for line in printed(summary).splitlines()]
    assert shown[-len(caption.splitlines()) :] == caption.splitlines()


def test_when_the_policys_health_changed_is_in_the_summary_and_the_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=9, plots=False)
    trouble = {step: Health("warning", 4, ["gradient norm 7.0 times the usual"], ["trainer.lr=1"]) for step in (4, 5)}
    trouble |= {6: Health("collapsing", 6, ["reward fallen from 0.9 to 0.1"], ["trainer.lr=1"]), 9: Health(since=9)}
    trouble |= {step: trouble[6] for step in (7, 8)}
    steps = [msgspec.structs.replace(s, health=trouble.get(s.step, HEALTHY)) for s in read_steps(folder)]
    write_steps(folder, steps)
    summary = write_report(folder)
    assert [(change.step, change.state) for change in summary.health] == [
        (4, "warning"),
        (6, "collapsing"),
        (9, "healthy"),
    ]
    assert json.loads((folder / "summary.json").read_text())["health"][1]["turn"] == ["trainer.lr=1"]
    text = printed(summary)
    for part in ("policy warning", "step 4", "gradient norm 7.0 times", "policy collapsing", "policy healthy"):
        assert part in text
    assert write_report(write_run(tmp_path / "calm", steps=3, plots=False)).health == []


def test_evaluations_are_in_the_summary_the_tables_and_the_plot(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=40)
    plain = write_report(folder)
    assert plain.evaluations == []
    without = (folder / "plots" / "reward.png").read_bytes()
    reports = [make_report(v, newest_version=v + 1, reward_mean=v / 40, rejected=v % 3) for v in range(0, 41, 2)]
    reports[3] = make_report(6, prompts=0, reward_mean=None, pass_at={}, response_length_mean=None, cut_share=None)
    lines = [msgspec.to_builtins(report, str_keys=True) for report in (*reports, reports[-1])]
    write_lines(folder / "evaluations.jsonl", lines)
    summary = write_report(folder)
    assert summary.evaluations == reports
    assert (folder / "plots" / "reward.png").read_bytes() != without
    text = printed(summary, evaluation_table(summary.evaluations))
    assert "0.000 → 1.000" in text
    assert "version 0 → 40, pass@1 0.250, pass@4 0.600" in text
    table = text[text.index("held-out prompts") :]
    assert "40–41" in table
    assert "64 (-1)" in table
    assert table.count("(k=4)") == 20  # with the first and the last
    assert "20 of 21 evaluations; all are in evaluations.jsonl" in table


@pytest.mark.parametrize("count", [0, 1, 2, 13, 20])
def test_few_evaluations_are_all_in_the_table(count: int) -> None:
    table = evaluation_table([make_report(version) for version in range(count)])
    assert table.row_count == count
    assert table.caption is None


def test_what_gservers_generate_after_a_restart_is_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=60, gservers=1)
    lines = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    beats = [line["stats"] for line in lines if line.get("role") == "gserver"]
    before = beats[59]["tokens_generated_total"]
    for stats in beats[60:]:
        stats["tokens_generated_total"] -= before
    write_lines(folder / "timeline.jsonl", lines)
    (axes,) = _draw_throughput(read_run(folder)).axes
    (generated,) = (line for line in axes.lines if line.get_label() == "generated")
    assert min(generated.get_ydata()) > 200  # of 250 to 420 tokens per second


def test_what_to_turn_is_told_with_a_runs_own_settings_whatever_version_it_had(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "config.toml").write_text("[staleness]\nmax_staleness = 2\nof_another_version = true\n")
    steps = [
        msgspec.structs.replace(step, metrics={**step.metrics, "tokens_sampled": 100.0}) for step in read_steps(folder)
    ]
    write_steps(folder, steps)
    summary = write_report(folder)
    assert summary.max_staleness == 2
    (found,) = [finding for finding in summary.findings if finding.topic == "staleness"]
    assert found.turn[0] == "staleness.max_staleness=4 (now 2)"


def test_nothing_is_trained_on_while_the_run_is_down(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=60)
    interrupt(folder, after=30, down=120.0)
    (axes,) = _draw_throughput(read_run(folder)).axes
    (trained,) = (line for line in axes.lines if line.get_label() == "trained on")
    rates = np.array(trained.get_ydata())  # of four seconds each
    assert rates == pytest.approx(np.repeat([400.0, 0.0, 400.0], [15, 30, 15]))


def test_the_most_frequent_failure_is_in_the_summary_and_in_its_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", plots=False)
    stats = {"groups_done_total": 90.0, "groups_rejected_total": 10.0}
    failures = [None, FrequentFailure("KeyError: 'x'", 10, "row 4 (seq 7): prompt '[b]1='"), None]  # started again
    beats = [
        HeartbeatEntry(time=EPOCH + 200 + n, role="rollout", index=0, stats=stats, failure=failure)
        for n, failure in enumerate(failures)
    ]
    add_beats(folder, beats)
    summary = write_report(folder)
    told = "most often KeyError: 'x' (10 times, first for row 4 (seq 7): prompt '[b]1=')"
    assert [finding.text for finding in summary.findings] == [f"10% of the groups were given up (10): {told}"]
    assert told in " ".join(printed(summary).split())


def test_what_is_unhealthy_is_in_the_summary_and_in_its_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", plots=False)
    assert write_report(folder).findings == []
    steps = [
        msgspec.structs.replace(step, metrics=step.metrics | {"tokens_masked": 800.0, "tokens_sampled": 1600.0})
        for step in read_steps(folder)
    ]
    write_steps(folder, steps)
    beats = [
        HeartbeatEntry(time=EPOCH + 200 + n, role="rollout", index=1, stats={"processor_seconds_total": seconds})
        for n, seconds in enumerate([1.0, 2.0, 0.5, 0.7, 0.1])
    ]
    add_beats(folder, beats)
    summary = write_report(folder)
    assert [(f.severity, f.topic) for f in summary.findings] == [("warning", "staleness"), ("note", "restarts")]
    assert "rollout/1 was started again twice" in summary.findings[1].text
    assert summary.processor_seconds == pytest.approx(2.0 + 0.7 + 0.1)
    assert json.loads((folder / "summary.json").read_text())["findings"][0]["turn"][0].startswith(
        "staleness.max_staleness=8"
    )
    text = printed(summary)
    assert "50% of the sampled tokens were more than 4 versions old" in text
    assert "try staleness.max_staleness=8 (now 4)" in " ".join(text.split())
