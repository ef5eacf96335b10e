"""The last lines of a log are found, and a run's folder is kept in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.launch import run_folders
from streamrl.launch.run_folders import cut, keep_in_order, last_lines


def test_last_lines(tmp_path: Path) -> None:
    file = tmp_path / "log"
    assert last_lines(file, 3) == []
    file.write_text("".join(f"line {i}\n\n" for i in range(10_000)))
    assert last_lines(file, 2) == ["line 9998", "line 9999"]


def test_a_log_that_is_too_long_is_cut_while_its_process_writes_on(tmp_path: Path) -> None:
    file = tmp_path / "gserver-0.log"
    with file.open("ab", buffering=0) as writer:
        for number in range(3):
            writer.write(b"12:00:00 WARNING gserver/0 the first\n" * 10)
            cut(file, most=100)
            assert file.stat().st_size == 0, number
            cut(file, most=100)
        writer.write(b"12:00:00 WARNING gserver/0 the last\n")
    assert file.read_bytes() == b"12:00:00 WARNING gserver/0 the last\n"
    assert (tmp_path / "gserver-0.log.1").read_bytes().count(b"the first") == 10, "one older file is kept"


async def test_a_full_disk_is_told_once_and_so_is_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    changed = asyncio.Event()

    def tell(sentence: str) -> None:
        told.append(sentence)
        changed.set()

    class Full:
        def __init__(self, **how: object) -> None:
            self._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115

        def __enter__(self) -> object:
            return self._file

        def __exit__(self, *error: object) -> None:
            self._file.close()

    keeping = asyncio.create_task(keep_in_order(tmp_path, tell=tell, every_seconds=0.02))
    await asyncio.sleep(0.1)
    assert told == []
    with monkeypatch.context() as full:
        full.setattr(run_folders.tempfile, "TemporaryFile", Full)
        await asyncio.wait_for(changed.wait(), 30)
        await asyncio.sleep(0.1)
        assert len(told) == 1
        assert "No space left on device" in told[0]
        changed.clear()
    await asyncio.wait_for(changed.wait(), 30)
    assert told[1:] == [f"{tmp_path} can be written again"]
    keeping.cancel()
