"""Checkpoints are whole or not there, are written beside the training, and a failed one costs only itself."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from streamrl.errors import DeadlineExceeded, PeerLost
from streamrl.records import progress
from streamrl.records.progress import REPLACED, Progress, write_folder
from streamrl.trainer.worker import checkpoint
from streamrl.trainer.worker.checkpoint import CheckpointWriter, Together
from tests.trainer.backends.world import run_world

LIMIT = 30.0


def content(version: int, text: str = "whole"):
    def write(folder: Path) -> None:
        (folder / "model").write_text(text)
        progress.write(folder, Progress(policy_version=version, trained=[], rejected=[], prompts=""))

    return write


def full_disk(folder: Path) -> None:
    (folder / "model").write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device")


class Shared:
    """What a worker writes: `text`, after which `progress.json` says `version`."""

    def __init__(self, version: int, *, text: bytes = b"whole", before: Callable[[], object] = lambda: None) -> None:
        """`before` is called when half of it is written."""
        self._version = version
        self._text = text
        self._before = before

    stems: ClassVar = ["model"]

    def content(self, stem: str) -> Iterator[bytes]:
        yield self._text[:2]
        self._before()
        yield self._text[2:]

    def complete(self, folder: Path) -> None:
        progress.write(folder, Progress(policy_version=self._version, trained=[], rejected=[], prompts=""))


def no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def alone() -> CheckpointWriter:
    return CheckpointWriter(Together(0, 1, seconds=LIMIT), keep=2, spare=None)


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


@pytest.mark.parametrize("renamed", [1, 2, 3])
def test_killed_while_one_takes_the_place_of_another_either_is_found(tmp_path, monkeypatch, renamed) -> None:
    folder = tmp_path / "checkpoints" / "final"
    write_folder(folder, content(1))
    os.utime(folder, (1, 1))
    calls = []
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) > renamed:  # 1: the old one is away, the new one is not there yet; 2: both are there
            raise KeyboardInterrupt
        return rename(self, target)

    def killed_halfway(path: Path) -> None:
        (path / "model").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    monkeypatch.setattr("streamrl.records.progress.shutil.rmtree", killed_halfway)
    with pytest.raises(KeyboardInterrupt):
        write_folder(folder, content(2))
    monkeypatch.undo()
    last = progress.checkpoints(tmp_path)[-1]
    assert (progress.read(last).policy_version, (last / "model").exists()) == (min(renamed, 2), True)
    write_folder(folder, content(3))
    assert progress.read(progress.checkpoints(tmp_path)[-1]).policy_version == 3
    assert REPLACED not in "".join(names(folder.parent))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    writer = alone()
    go_on = threading.Event()
    assert writer.finish(limit=LIMIT) == ""
    writer.begin(tmp_path / "step-000001", Shared(1, before=lambda: go_on.wait(LIMIT)))
    assert not (tmp_path / "step-000001").exists()
    with pytest.raises(DeadlineExceeded, match="step-000001 is not on the disk"):
        writer.finish(limit=0.05)
    go_on.set()
    assert writer.finish(limit=LIMIT) == ""
    assert progress.read(tmp_path / "step-000001").policy_version == 1
    assert names(tmp_path / "step-000001") == {"model.safetensors", progress.STATE}


def test_a_full_disk_costs_one_checkpoint_and_is_told_once(tmp_path: Path) -> None:
    writer = alone()

    def save(version: int, **share: Any) -> str:
        writer.begin(tmp_path / f"step-{version:06d}", Shared(version, **share))
        return writer.finish(limit=LIMIT)

    (tmp_path / "step-000009.unfinished").mkdir()  # of a run that was killed
    assert [save(version) for version in (1, 2)] == ["", ""]
    failure = save(3, before=no_space)
    assert "step-000003 cannot be written" in failure
    assert "No space left" in failure
    assert writer.finish(limit=LIMIT) == ""
    assert names(tmp_path) == {"step-000001", "step-000002"}  # older ones go only when there is a newer one
    assert save(4) == ""
    assert names(tmp_path) == {"step-000002", "step-000004"}


def _write_together(rank: int, shared: Path, elsewhere: Path) -> None:
    """Three workers, of which the last has a disk of its own; in turn the disk of each is full."""
    together = Together(rank, 3, seconds=LIMIT)
    writer = CheckpointWriter(together, keep=2, spare=None)
    folder = (elsewhere if rank == 2 else shared) / "checkpoints"

    def save(version: int, **share: Any) -> str:
        writer.begin(folder / f"step-{version:06d}", Shared(version, text=b"of rank %d" % rank, **share))
        return writer.finish(limit=LIMIT)

    assert save(1) == ""
    for full in range(3):
        failure = save(2 + full, before=no_space if rank == full else lambda: None)
        assert f"model_worker/{full}: [Errno 28] No space left" in failure
    assert save(5) == ""
    if rank < 2:
        found = {
            file.name: file.read_bytes() for file in (shared / "checkpoints" / "step-000005").glob("*.safetensors")
        }
        assert found == {f"model-{n + 1:05d}-of-00003.safetensors": b"of rank %d" % n for n in range(3)}
        assert names(folder) == {"step-000001", "step-000005"}
    assert not any(elsewhere.rglob("*.safetensors"))
    # an error of one's own is raised there, and the others are told
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            save(6, before=lambda: 1 / 0)
    else:
        assert "model_worker/1: division by zero" in save(6)


def test_workers_write_their_parts_into_one_checkpoint(tmp_path: Path) -> None:
    run_world(3, _write_together, tmp_path / "shared", tmp_path / "elsewhere")


def _one_is_killed(rank: int, folder: Path) -> None:
    """While the second writes it is gone: the first raises that soon, logs its own failure, and the old checkpoint is
    whole."""
    writer = CheckpointWriter(Together(rank, 2, seconds=LIMIT), keep=2, spare=None)
    writer.begin(folder / "step-000001", Shared(1))
    assert writer.finish(limit=LIMIT) == ""
    writer.begin(folder / "step-000002", Shared(2, before=(lambda: os._exit(0)) if rank else lambda: 1 / 0))
    with mock.patch.object(checkpoint.log, "error") as logged, pytest.raises(PeerLost, match="written: the others"):
        writer.finish(limit=LIMIT)
    assert "model_worker/0: division by zero" in str(logged.call_args)
    assert [path.name for path in progress.checkpoints(folder.parent)] == ["step-000001"]
    os._exit(0)  # the world is no more


def test_a_worker_that_dies_while_it_writes_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    run_world(2, _one_is_killed, tmp_path / "checkpoints")
