"""Lines on a disk that is full for a while."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.line_file import LineFile


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: a disk that is full, in the middle of a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"{number:019d}".encode() for number in range(6)]
    file = LineFile(tmp_path / "folder" / "lines")
    with room_for(50):
        for line in lines[:5]:
            file.append(line)
    assert file.path.read_bytes() == b"\n".join(lines)[:50], "cut in the middle of a line"
    file.append(lines[5])
    assert file.path.read_bytes().splitlines() == lines
    assert [record.message.partition(str(file.path))[2][:20] for record in caplog.records] == [
        " cannot be written (",
        " is written again",
    ]
    file.close()


def test_a_line_that_was_torn_by_a_crash_stays_alone(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"whole\nto")
    file = LineFile(tmp_path / "lines")
    file.append(b"new")
    assert (tmp_path / "lines").read_bytes() == b"whole\nto\nnew\n"
    file.close()
