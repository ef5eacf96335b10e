"""Files of JSON lines: written to a disk that is full for a while, read back after a crash."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from streamrl.errors import DataError
from streamrl.records.files import LineFile, decode_line, read_lines, read_records


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


class _Point(msgspec.Struct):
    x: int


def test_lines_that_cannot_be_read_are_left_out_and_the_first_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "points.jsonl"
    assert read_records(file, _Point) == []
    file.write_bytes(b'{"x":1}\n{"x":"no"}\n{"x":2,"later":0}\n\xff\n{"x":')
    assert read_lines(file, _Point) == [(b'{"x":1}', _Point(1)), (b'{"x":2,"later":0}', _Point(2))]
    assert "3 lines cannot be read" in caplog.text
    assert f"{file}, line 2: not a record of this file (Expected `int`, got `str` - at `$.x`)" in caplog.text


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_an_error_names_file_line_and_what_is_wrong(line: bytes) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, line 7: not a JSON object \(.+\); it begins b'"):
        decode_line(
            line, msgspec.json.Decoder(dict[str, object]), what="a JSON object", file=Path("rows.jsonl"), number=7
        )
