"""Files of JSON lines: written to a disk that is full for a while, read back after a crash."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import DataError
from streamrl.records import files
from streamrl.records.files import LineFile, Lines, decode_line, read_lines, read_records


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


class Entry(msgspec.Struct):
    n: int


@given(
    st.lists(
        st.one_of(
            st.integers(0, 10**6).map(lambda n: b'{"n":%d}\n' % n),
            st.just(b'{"n": "no number"}\n'),
            st.just(b'{"n":1'),
            st.just(b"\xff\n"),
            st.just(b"\n"),
        ),
        max_size=25,
    ),
    st.data(),
)
@settings(deadline=None)
def test_lines_are_followed_as_they_come(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], data: st.DataObject
) -> None:
    """Whatever pieces a file grows by, all whole records are told once and in order, those of a torn end later."""
    file = tmp_path_factory.mktemp("lines") / "entries.jsonl"
    lines: Lines[Entry] = Lines(file, Entry)
    assert lines.new() == (False, [])
    content = b"".join(pieces)
    found: list[int] = []
    with file.open("ab", buffering=0) as growing:
        while content:
            size = data.draw(st.integers(1, len(content)))
            growing.write(content[:size])
            content = content[size:]
            anew, entries = lines.new()
            assert not anew
            found += [entry.n for entry in entries]
    whole = file.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    meant, unreadable = [], 0
    for line in whole.splitlines():
        try:
            meant.append(msgspec.json.decode(line, type=Entry).n)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            unreadable += 1
    assert found == meant
    assert lines.unreadable == unreadable


def test_a_file_that_begins_anew_is_told(tmp_path: Path) -> None:
    file = tmp_path / "entries.jsonl"
    lines: Lines[Entry] = Lines(file, Entry)

    def written(*numbers: int) -> bytes:
        return b"".join(b'{"n":%d}\n' % n for n in numbers)

    file.write_bytes(written(1, 2, 3))
    assert lines.new() == (False, [Entry(1), Entry(2), Entry(3)])
    assert lines.new() == (False, [])
    file.write_bytes(written(1))  # taken back, in place
    assert lines.new() == (True, [Entry(1)])
    other = tmp_path / "other"
    other.write_bytes(written(4, 5, 6, 7))  # another file in its place, longer than what was read
    other.replace(file)
    assert lines.new() == (True, [Entry(n) for n in (4, 5, 6, 7)])
    file.write_bytes(written(4, 5, 6, 8, 9))  # one with the same number, as the file of a run resumed twice may have
    assert lines.new() == (True, [Entry(n) for n in (4, 5, 6, 8, 9)])
    assert lines.new() == (False, [])
    file.unlink()
    assert lines.new() == (False, [])


def test_a_long_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_READ", 30)
    file = tmp_path / "entries.jsonl"
    file.write_bytes(b"".join(b'{"n":%d}\n' % n for n in range(100)))
    lines: Lines[Entry] = Lines(file, Entry)
    found: list[int] = []
    while new := lines.new()[1]:
        assert len(new) <= 5
        found += [entry.n for entry in new]
    assert found == list(range(100))
