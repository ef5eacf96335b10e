"""Checkpoints in the memory of the machine."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import DataError
from streamrl.records import lineage as lineages
from streamrl.records import progress, snapshots
from streamrl.records.progress import Progress
from streamrl.trainer.master.history import SNAPSHOT_SHARE, SnapshotPace


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the memory that all processes of this machine share."""
    root = tmp_path / "shm"
    root.mkdir()
    rooted = (snapshots.folder_of, snapshots.kept, snapshots.remove, snapshots.check_room, snapshots.in_use)
    for function in rooted:
        inner = getattr(function, "__wrapped__", function)
        monkeypatch.setitem(inner.__kwdefaults__, "root", root)
    return root


def save(folder: Path, version: int, *, lineage: int = 0) -> Path:
    (folder / f"step-{version:06d}").mkdir(parents=True)
    reached = Progress(policy_version=version, trained=[], rejected=[], prompts="", lineage=lineage)
    progress.write(folder / f"step-{version:06d}", reached)
    return folder / f"step-{version:06d}"


def test_a_run_continues_from_the_latest_wherever_it_is(tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "run" / "checkpoints"
    with snapshots.kept(run):
        memory = snapshots.folder_of(run)
        older, latest = save(disk, 10), save(memory, 12)
        assert progress.checkpoints(run) == [older, latest]
        newest = save(disk, 12)
        assert progress.checkpoints(run) == [older, latest, newest]
        lineages.begin(run, policy_version=10, parent=0, cause="a death", steps_reached=13)
        assert progress.checkpoints(run) == [older]
        assert progress.checkpoints(run, abandoned=True)[-1] == older
        another = save(memory, 11, lineage=1)
        progress.prune(memory, keep=1, spare=None, run_dir=run)
        assert progress.checkpoints(run) == [older, another]
        assert not latest.exists()
        memory.chmod(0o755)
        assert progress.checkpoints(run) == [older], "another user could have made it"


def test_the_latest_is_kept_when_the_memory_is_given_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with snapshots.kept(run):
        save(run / "checkpoints", 10)
        save(snapshots.folder_of(run), 12)
        progress.copy_latest_snapshot(run)
        snapshots.remove(run)
    assert [folder.parent.name for folder in progress.checkpoints(run)] == ["checkpoints", "checkpoints"]
    assert progress.read(progress.checkpoints(run)[-1]).policy_version == 12
    assert not snapshots.folder_of(run).exists()
    progress.copy_latest_snapshot(run)


def test_a_snapshot_stays_in_memory_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(progress, "all_to_disk", full)
    run = tmp_path / "run"
    with snapshots.kept(run):
        snapshot = save(snapshots.folder_of(run), 12)
        with pytest.raises(DataError, match=r"No space left on device.*make room there, then continue with --resume"):
            progress.copy_latest_snapshot(run)
    assert progress.checkpoints(run) == [snapshot]
    assert list((run / "checkpoints").iterdir()) == []


def test_memory_of_dead_runs_is_given_back(tmp_path: Path, memory: Path) -> None:
    alive, dead = tmp_path / "alive", tmp_path / "dead"
    with snapshots.kept(alive):
        with snapshots.kept(dead):
            save(snapshots.folder_of(dead), 3)
        assert snapshots.folder_of(dead).exists(), "it may be resumed"
        (memory / f"{snapshots.PREFIX}another").mkdir(mode=0o777)
        (memory / f"{snapshots.PREFIX}another").chmod(0o777)
        with snapshots.kept(tmp_path / "next"):
            assert snapshots.folder_of(dead).exists(), "it may be restarted"
        long_ago = time.time() - snapshots.ABANDONED_SECONDS
        for folder in (alive, dead):
            os.utime(snapshots.folder_of(folder), (long_ago, long_ago))
        with snapshots.kept(tmp_path / "next"):
            assert not snapshots.folder_of(dead).exists()
            assert snapshots.folder_of(alive).exists()
            assert (memory / f"{snapshots.PREFIX}another").exists(), "another user could have made it"


def test_snapshots_are_in_use_while_their_controller_lives(tmp_path: Path) -> None:
    assert not snapshots.in_use(tmp_path)
    with snapshots.kept(tmp_path):
        assert snapshots.in_use(tmp_path)
        save(snapshots.folder_of(tmp_path), 3)
    assert snapshots.folder_of(tmp_path).exists(), "the run may be resumed"
    assert not snapshots.in_use(tmp_path)


def test_a_controller_without_snapshots_leaves_nothing_behind(tmp_path: Path) -> None:
    with snapshots.kept(tmp_path):
        pass
    assert not snapshots.folder_of(tmp_path).exists()


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshots.folder_of(tmp_path).mkdir(mode=0o755)
    with snapshots.kept(tmp_path):
        assert "no snapshots are kept in memory" in caplog.text


def test_without_shared_memory_there_are_none(tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(memory)
    with snapshots.kept(tmp_path):
        assert "no snapshots are kept in memory" in caplog.text
        assert progress.checkpoints(tmp_path) == []


def test_a_snapshot_leaves_most_of_the_memory_free() -> None:
    snapshots.check_room(1)
    with pytest.raises(OSError, match="would take more than 33% of the"):
        snapshots.check_room(2**60)


@given(st.lists(st.floats(0.0, 10.0), min_size=20, max_size=20), st.floats(0.01, 10.0))
def test_snapshots_take_no_more_than_their_share_of_the_time(costs: list[float], step_seconds: float) -> None:
    pace, spent, taken = SnapshotPace(None, step=0), 0.0, 0
    for step in range(1, 2000):
        if not pace.due(step):
            continue
        assert spent <= SNAPSHOT_SHARE * step * step_seconds + 1e-9, "what was spent before has paid off"
        seconds = costs[taken % len(costs)]
        pace.taken(step, seconds=seconds, step_seconds=step_seconds)
        spent, taken = spent + seconds, taken + 1
    assert taken


def test_snapshots_come_as_configured() -> None:
    pace = SnapshotPace(3, step=6)
    due = []
    for step in range(7, 16):
        if pace.due(step):
            due.append(step)
            pace.taken(step, seconds=100.0, step_seconds=1.0)
    assert due == [9, 12, 15]
    assert not any(SnapshotPace(0, step=0).due(step) for step in range(5))
