"""A run's folder followed, and its tables."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.config import from_dict, to_toml
from streamrl.errors import ConfigError
from streamrl.page import answers
from streamrl.page.lanes import MOST_PIECES, Lane, lanes
from streamrl.records.logs import tail
from streamrl.records.rollouts import FOLDER
from streamrl.records.rollouts_writer import RolloutWriter
from streamrl.records.view import RunView, found_in, read_run
from tests.launch.statuses import EPOCH
from tests.page.made_up import branching_group
from tests.runs import beat, interrupt, write_lines, write_run


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        found_in([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="is no run"):
        found_in([tmp_path])
    one, two = write_run(tmp_path / "one", steps=1), write_run(tmp_path / "two", steps=1)
    assert found_in([tmp_path, one]) == [one, two]


def test_a_folder_that_may_not_be_looked_into_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (tmp_path / "lost+found").mkdir()
    look = os.stat

    def stat(path: Any, *words: Any, **options: Any) -> os.stat_result:
        if "lost+found/" in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return look(path, *words, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert found_in([tmp_path]) == [run]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("config.toml", f"a = {'[' * 20_000}"),
        ("metrics.jsonl", f'{{"step":{"9" * 400},"time":1.0,"metrics":{{}}}}\n'),
    ],
)
def test_what_is_no_record_is_left_out(file: str, line: str, tmp_path: Path) -> None:
    """Else it would end the page, and with it what others are looking at."""
    folder = write_run(tmp_path / "run", steps=2)
    (folder / file).write_text(line)
    run = read_run(folder)
    assert answers.facts(run, number=0).name == "run"


@pytest.mark.parametrize("given", [".", "../run", "plots/.."])
def test_a_run_has_its_name_however_its_folder_is_given(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    (folder / "plots").mkdir()
    monkeypatch.chdir(folder)
    assert [RunView(found).name for found in found_in([Path(given)])] == ["run"]


def test_the_state_of_a_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10)
    run = RunView(folder)
    assert run.state()[0] == "empty"
    run.refresh()
    assert run.state() == ("finished", "all steps are done")
    (folder / "final.json").unlink()
    assert run.refresh()
    assert run.state(now=EPOCH + 25)[0] == "running"
    assert run.state(now=EPOCH + 100)[0] == "silent"


def test_a_resumed_run_makes_steps_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10)
    run = read_run(folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    with (folder / "metrics.jsonl").open("a") as file:
        for line in lines[5:8]:
            file.write(line.replace('"loss": 0.0123', '"loss": 7.0') + "\n")
    run.refresh()
    columns = run.columns()
    assert columns["step"].tolist() == list(range(1, 11))
    assert columns["loss"][4:9].tolist() == [0.0123, 7.0, 7.0, 7.0, 0.0123]


def working(second: float, used: float, waiting_for: str = "") -> dict[str, Any]:
    """A heartbeat of a rollout worker that has used so many seconds of its processor."""
    return beat(second, "rollout", 0, stats={"processor_seconds_total": used}, waiting_for=waiting_for)


def total(lane: Lane, kind: str) -> float:
    return sum((piece.end - piece.begin) * piece.height for piece in lane.pieces if piece.kind == kind)


def test_lanes_tell_the_same_from_near_and_from_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn as pieces or as shares of columns, each kind takes the same time."""
    run = read_run(write_run(tmp_path / "run", steps=900, seconds=2.0, gservers=1))
    end = run.end - run.begin
    edges = np.linspace(0, end, 9)
    near = [lanes(run, begin=a, end=b, columns=300) for a, b in pairwise(edges)]
    monkeypatch.setattr("streamrl.page.lanes.MOST_PIECES", 800)
    far = {lane.name: lane for lane in lanes(run, begin=0, end=end, columns=300)}
    assert all(len(lane.pieces) <= 5 * MOST_PIECES for lane in far.values())
    for name, kind in (
        ("trainer", "actor_train"),
        ("trainer", "wait"),
        ("gserver/0", "generate"),
        ("controller/0", "wait"),
        ("weight updates", "publish"),
    ):
        pieces = {
            piece
            for found in near
            for lane in found
            if lane.name == name
            for piece in lane.pieces
            if piece.kind == kind
        }
        exact = sum((piece.end - piece.begin) * piece.height for piece in pieces)
        assert total(far[name], kind) == pytest.approx(exact, rel=0.02)
    assert total(far["trainer"], "wait") == pytest.approx(0.2 * 900 * 2.0, rel=0.02)


def test_lanes_tell_restarts_and_times_away(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=30, gservers=1)
    seconds = [float(i) for i in range(20)] + [0.5 + i for i in range(40)]
    beats = [working(i + (30 if i > 40 else 0), used) for i, used in enumerate(seconds)]
    write_lines(folder / "timeline.jsonl", beats)
    run = read_run(folder)
    (lane,) = [lane for lane in lanes(run, begin=0, end=100, columns=100) if lane.name == "rollout/0"]
    kinds = {piece.kind: (piece.begin, piece.end) for piece in lane.pieces}
    assert kinds["restart"] == (19.0, 20.0)
    assert kinds["away"] == (40.0, 71.0)


def test_logs_are_merged_by_time(tmp_path: Path) -> None:
    (tmp_path / "controller-0.log").write_text(
        "23:59:58 INFO    controller/0 before midnight\n00:00:02 WARNING controller/0 late\n  with a second line\n"
    )
    (tmp_path / "gserver-1.log").write_text("printed at once\n00:00:01 ERROR   gserver/1 <b>broken</b>\n")
    lines = tail(tmp_path)
    assert [line.text for line in lines] == [
        "printed at once",
        "before midnight",
        "<b>broken</b>",
        "late\n  with a second line",
    ]
    assert [line.process for line in tail(tmp_path, level="WARNING")] == ["gserver-1", "controller-0"]
    assert [line.process for line in tail(tmp_path, text="BROKEN")] == ["gserver-1"]
    assert tail(tmp_path, processes=["controller-0"], most=1)[0].level == "WARNING"
    assert lines[-1].time - lines[1].time == pytest.approx(4.0)
    assert msgspec.json.encode(lines)


def test_all_conversations_of_an_episode_have_the_parts_of_its_reward(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    group = branching_group(1, 5)
    group.reward_parts = [{"function": 1.0, "overlong": -0.5}] * 3  # of its one episode
    writer = RolloutWriter(folder / FOLDER / "rank-0", most_bytes=2**20, policy_version=0)
    writer.append(group)
    writer.write()
    run = read_run(folder)
    assert [one.reward_parts for one in answers.group(run, step=1, seq=5).responses] == group.reward_parts


def test_nobody_waits_while_the_run_is_down(tmp_path: Path) -> None:
    """Killed, and resumed hours later: the heartbeats before and after tell of waiting, and the lane of a restart."""
    folder = write_run(tmp_path / "run", steps=1)
    beats = [working(begin + up, 1.0 + up, "room in the ledger") for begin in (0, 10_000) for up in range(11)]
    write_lines(folder / "timeline.jsonl", beats)
    run = read_run(folder)
    assert answers.fleet(run).waits == [("rollout/0", "room in the ledger", 20.0, 1.0)]
    (near,) = [lane for lane in lanes(run, begin=0, end=10_010, columns=1001) if lane.name == "rollout/0"]
    assert [(piece.begin, piece.end, piece.kind) for piece in near.pieces] == [
        (0.0, 10.0, "wait"),
        (10_000.0, 10_010.0, "wait"),
        (10.0, 10_000.0, "restart"),  # drawn last, on top of what is before and after
    ]


def test_far_away_nobody_waits_or_works_while_the_run_is_down(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    beats = [working(begin + up, 1.0 + up, "room" if up % 2 else "") for begin in (0, 100_000) for up in range(1001)]
    write_lines(folder / "timeline.jsonl", beats)
    run = read_run(folder)
    (far,) = [lane for lane in lanes(run, begin=0, end=101_000, columns=1010) if lane.name == "rollout/0"]
    assert total(far, "wait") == pytest.approx(1000, rel=0.02)
    assert total(far, "work") == pytest.approx(1000, rel=0.02)


def test_the_first_step_after_a_resume_begins_when_the_run_is_up_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    down = 10_000.0
    interrupt(folder, after=2, down=down)
    beats = []
    for up in range(5):
        stats = {"tokens_generated_total": 100.0 * up, "busy_seconds_total": 0.5 * up, "processor_seconds_total": up}
        beats += [beat(begin + up, "gserver", 0, stats=stats) for begin in (0, 4.0 + down)]
    beats.sort(key=lambda line: line["time"])
    write_lines(folder / "timeline.jsonl", beats)
    run = read_run(folder)
    columns = run.columns()
    assert columns["generated_per_second"].tolist() == pytest.approx([100.0] * 4)
    assert columns["generation_busy"].tolist() == pytest.approx([0.5] * 4)


def test_a_run_that_goes_on_with_other_settings_is_shown_with_them(tmp_path: Path) -> None:
    run = RunView(write_run(tmp_path / "run", steps=1))
    os.utime(run.folder / "config.toml", (EPOCH, EPOCH))
    assert answers.facts(run, number=0).max_staleness == 4
    changed = {"run": {"total_train_steps": 500}, "staleness": {"max_staleness": 2}}
    (run.folder / "config.toml").write_text(to_toml(from_dict(changed)))
    facts = answers.facts(run, number=0)
    assert (facts.most_steps, facts.max_staleness) == (500, 2)


def test_the_weights_that_are_served_are_the_last_ones_also_when_a_run_went_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    updates = [
        {"kind": "publication", "time": EPOCH + i, "begin": EPOCH + i, "end": EPOCH + i, "pause": 0.0,
         "version": version, "done": done, "error": ""}
        for i, (version, done) in enumerate([(4, True), (5, True), (3, True), (4, False)])
    ]  # fmt: skip
    write_lines(folder / "timeline.jsonl", updates)
    run = read_run(folder)
    assert answers.fleet(run).served_version == 3


def test_a_folder_that_its_server_has_lost_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, when somebody removes it on another host."""
    run = RunView(write_run(tmp_path / "run", steps=1))
    assert run.refresh()
    assert len(run.rollouts) == 0

    def lost(*words: Any, **options: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "stat", lost)
    monkeypatch.setattr(os, "listdir", lost)
    run.refresh()
    assert run.state()[0] == "gone"


@pytest.mark.parametrize(("run", "most"), [({}, 100), ({"total_train_steps": 7}, 7), ({"total_train_epochs": 2}, None)])
def test_how_many_steps_a_run_makes_at_most(run: dict[str, int], most: int | None, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    (folder / "config.toml").write_text(to_toml(from_dict({"run": run})))
    assert answers.facts(RunView(folder), number=0).most_steps == most
