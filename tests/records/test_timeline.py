"""The timeline covers a run of any length in a file of limited length."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from time import sleep

import pytest

from streamrl.records.timeline import HEARTBEATS_PER_SECOND, TIMELINE_FILE, HeartbeatEntry, PublicationEntry, Timeline

BEATS = 3000
MOST = 20_000


def test_a_long_run_is_thinned_out_and_never_too_long(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, max_bytes=MOST)
    for beat in range(BEATS):
        for index in range(2):
            stats = {"running": 1.0}
            timeline.add(HeartbeatEntry(time=float(beat), role="gserver", index=index, stats=stats))
        if beat % 300 == 0:
            begin, end = float(beat), beat + 1.0
            timeline.add(PublicationEntry(time=end, begin=begin, end=end, pause=0.1, version=beat, done=True, error=""))
    timeline.close()
    file = tmp_path / TIMELINE_FILE
    assert 0 < file.stat().st_size <= MOST + 200
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert Counter(entry["kind"] for entry in entries)["publication"] == 10, "these are few, and all stay"
    for index in range(2):
        times = [entry["time"] for entry in entries if entry["kind"] == "heartbeat" and entry["index"] == index]
        assert len(times) >= 20
        assert times == sorted(times)
        assert times[0] < 0.1 * BEATS
        assert times[-1] > 0.9 * BEATS
        gaps = [after - before for before, after in pairwise(times)]
        assert max(gaps) < 0.1 * BEATS, "the whole run is covered"
    assert [path.name for path in tmp_path.iterdir()] == [TIMELINE_FILE]


def test_a_disk_without_room_for_a_thinner_file_costs_no_later_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes
    full = True

    def write_bytes(file: Path, data: bytes) -> int:
        if full:
            write(file, data[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    timeline = Timeline(tmp_path, max_bytes=MOST)

    def beats(times: range) -> None:
        for time in map(float, times):
            timeline.add(HeartbeatEntry(time=time, role="gserver", index=0, stats={}))
            if full:
                update = PublicationEntry(time=time, begin=time, end=time, pause=0.1, version=1, done=True, error="")
                timeline.add(update)
        while not timeline._entries.empty():
            sleep(0.01)

    beats(range(200))
    assert (tmp_path / TIMELINE_FILE).stat().st_size > MOST
    full = False
    beats(range(200, 1200))
    timeline.close()
    assert (tmp_path / TIMELINE_FILE).stat().st_size <= MOST + 200
    entries = [json.loads(line) for line in (tmp_path / TIMELINE_FILE).read_text().splitlines()]
    assert max(entry["time"] for entry in entries if entry["kind"] == "heartbeat") > 1100
    full = True
    timeline = Timeline(tmp_path, max_bytes=MOST)
    beats(range(1200, 1400))
    timeline.close()
    assert [path.name for path in tmp_path.iterdir()] == [TIMELINE_FILE], "what was begun takes no room"


def test_of_many_processes_each_has_fewer_heartbeats_written(tmp_path: Path) -> None:
    processes, seconds = 5 * HEARTBEATS_PER_SECOND, 20
    timeline = Timeline(tmp_path)
    for second in range(seconds):
        for index in range(processes):
            time = 1e9 + second + index / processes
            timeline.add(HeartbeatEntry(time=time, role="rollout", index=index, stats={"running": 1.0}))
    timeline.close()
    written = Counter(json.loads(line)["index"] for line in (tmp_path / TIMELINE_FILE).read_text().splitlines())
    assert len(written) == processes, "each of them is there"
    assert written.total() <= HEARTBEATS_PER_SECOND * seconds + 2 * processes
    assert min(written.values()) >= seconds / 5 - 2


def test_members_that_have_left_do_not_thin_out_the_others(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    for index in range(5 * HEARTBEATS_PER_SECOND):
        timeline.add(HeartbeatEntry(time=1e9, role="rollout", index=index, stats={}))
    for second in range(1000, 1100):
        timeline.add(HeartbeatEntry(time=1e9 + second, role="gserver", index=0, stats={}))
    timeline.close()
    lines = (tmp_path / TIMELINE_FILE).read_text().splitlines()
    assert sum(json.loads(line)["role"] == "gserver" for line in lines) == 100
