"""Following files that grow."""

from __future__ import annotations

from pathlib import Path

from streamrl.launch.files import Tail, Warnings, last_lines


def test_only_complete_new_lines(tmp_path: Path) -> None:
    file = tmp_path / "log"
    tail = Tail(file)
    assert tail.new_lines() == []
    file.write_text("one\ntw")
    assert tail.new_lines() == ["one"]
    with file.open("a") as stream:
        stream.write("o\nthree\n")
    assert tail.new_lines() == ["two", "three"]
    assert tail.new_lines() == []


def test_warnings_of_all_logs(tmp_path: Path) -> None:
    (tmp_path / "gserver-0.log").write_text(
        "12:00:00 INFO    gserver/0 ready\n12:00:01 WARNING gserver/0 slow\nTraceback WARNING\n"
    )
    (tmp_path / "rollout-0.log").write_text("12:00:02 ERROR   rollout/0 RewardError: no\n")
    warnings = Warnings(tmp_path)
    assert warnings.recent() == ["gserver/0 slow", "rollout/0 RewardError: no"]
    assert warnings.recent() == ["gserver/0 slow", "rollout/0 RewardError: no"]


def test_last_lines(tmp_path: Path) -> None:
    file = tmp_path / "log"
    assert last_lines(file, 3) == []
    file.write_text("".join(f"line {i}\n\n" for i in range(10_000)))
    assert last_lines(file, 2) == ["line 9998", "line 9999"]
