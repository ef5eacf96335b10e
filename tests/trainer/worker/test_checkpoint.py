"""Checkpoints are whole or not there, are written beside the training, and a failed one costs only itself."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from streamrl.errors import DeadlineExceeded
from streamrl.records import progress
from streamrl.records.progress import Progress
from streamrl.trainer.worker.checkpoint import REPLACED, CheckpointWriter, write_folder

LIMIT = 30.0


def content(version: int, text: str = "whole"):
    def write(folder: Path) -> None:
        (folder / "model").write_text(text)
        progress.write(folder, Progress(policy_version=version, trained=[], rejected=[], prompts=""))

    return write


def full_disk(folder: Path) -> None:
    (folder / "model").write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_appears_at_once_and_what_was_there_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "final"
    seen: list[set[str]] = []

    def write(unfinished: Path) -> None:
        content(1)(unfinished)
        seen.append(names(folder.parent))

    write_folder(folder, write)
    assert seen == [{"final.unfinished"}]
    write_folder(folder, content(2, "new"))
    assert (folder / "model").read_text() == "new"
    assert names(folder.parent) == {"final"}
    with pytest.raises(OSError, match="No space left"):
        write_folder(folder, full_disk)
    assert (folder / "model").read_text() == "new"
    assert names(folder.parent) == {"final"}


@pytest.mark.parametrize("renamed", [1, 2])
def test_killed_while_one_takes_the_place_of_another_either_is_found(tmp_path, monkeypatch, renamed) -> None:
    folder = tmp_path / "checkpoints" / "final"
    write_folder(folder, content(1))
    os.utime(folder, (1, 1))
    calls = []
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) > renamed:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    if renamed == 1:  # the old one is away, the new one is not there yet
        with pytest.raises(KeyboardInterrupt):
            write_folder(folder, content(2))
    else:
        monkeypatch.setattr("streamrl.trainer.worker.checkpoint.shutil.rmtree", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_folder(folder, content(2))
        assert names(folder.parent) == {"final", "final" + REPLACED}
    monkeypatch.undo()
    assert progress.read(progress.checkpoints(tmp_path)[-1]).policy_version == renamed
    write_folder(folder, content(3))
    assert progress.read(progress.checkpoints(tmp_path)[-1]).policy_version == 3
    assert REPLACED not in "".join(names(folder.parent))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    writer = CheckpointWriter(keep=2, spare=None)
    go_on = threading.Event()

    def slow(folder: Path) -> None:
        go_on.wait(LIMIT)
        content(1)(folder)

    assert writer.settle(limit=LIMIT) == ""
    writer.begin(tmp_path / "step-000001", slow)
    assert "step-000001" not in names(tmp_path)
    with pytest.raises(DeadlineExceeded, match="step-000001 is not on the disk"):
        writer.settle(limit=0.05)
    go_on.set()
    assert writer.settle(limit=LIMIT) == ""
    assert progress.read(tmp_path / "step-000001").policy_version == 1


def test_a_full_disk_costs_one_checkpoint_and_is_told_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(keep=2, spare=None)

    def save(version: int, write=None) -> str:
        writer.begin(tmp_path / f"step-{version:06d}", write or content(version))
        return writer.settle(limit=LIMIT)

    (tmp_path / "step-000009.unfinished").mkdir()  # of a run that was killed
    assert [save(version) for version in (1, 2)] == ["", ""]
    failure = save(3, full_disk)
    assert "step-000003 cannot be written" in failure
    assert "No space left" in failure
    assert writer.settle(limit=LIMIT) == ""
    assert names(tmp_path) == {"step-000001", "step-000002"}  # older ones go only when there is a newer one
    assert save(4) == ""
    assert names(tmp_path) == {"step-000002", "step-000004"}


def test_what_is_no_matter_of_the_disk_is_raised(tmp_path: Path) -> None:
    writer = CheckpointWriter(keep=2, spare=None)
    writer.begin(tmp_path / "step-000001", lambda folder: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        writer.settle(limit=LIMIT)
