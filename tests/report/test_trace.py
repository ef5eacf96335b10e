"""The trace file: parsed back, held against the format's rules, and against the run that it shows."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.records.collapse import Health
from streamrl.records.metrics import StepReport
from streamrl.records.timeline import HeartbeatEntry, PublicationEntry
from streamrl.records.view import RunView, read_run
from streamrl.report.trace import write_trace
from tests.evaluations import make_report
from tests.launch.statuses import EPOCH
from tests.runs import read_steps, view_of, write_lines, write_run

Json = dict[str, Any]


def written(run: RunView, file: Path) -> list[Json]:
    """The events of `run`, which went through `file`."""
    count = write_trace(run, file)
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    # a JSON that knows no NaN, as those of browsers
    parsed = json.loads(content, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert set(parsed) == {"displayTimeUnit", "traceEvents"}
    assert len(parsed["traceEvents"]) == count
    return parsed["traceEvents"]


def check(events: list[Json]) -> None:
    """Hold `events` against the rules of the Trace Event Format that matter to Perfetto's importer."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert len(set(processes.values())) == len(processes), "two processes of one name"
    reached: dict[tuple[int, int], float] = defaultdict(float)
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert event["pid"] in processes, "of a process without a name"
        match event["ph"]:
            case "X":
                track = event["pid"], event["tid"]
                assert track in tracks, "on a track without a name"
                assert event["dur"] >= 0
                assert event["ts"] >= reached[track] - 1.0, "slices of a track overlap by more than a microsecond"
                reached[track] = event["ts"] + event["dur"]
            case "C":
                assert event["ts"] >= 0
                assert all(type(value) in (int, float) for value in event["args"].values())
                assert len(event["args"]) == 1
            case "i":
                assert event["ts"] >= 0
                assert event["s"] == "p"
            case "M":
                assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
                (value,) = event["args"].values()
                assert isinstance(value, int if event["name"].endswith("index") else str)
            case other:
                pytest.fail(f"an event of the kind {other}")


def slices(events: list[Json], process: str, track: str = "does") -> list[tuple[str, float, float]]:
    """(name, begin, duration) in seconds of one track."""
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    pid = names[process]
    tids = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    return [
        (e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tids[track])
    ]


def test_a_whole_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=20)
    write_lines(folder / "evaluations.jsonl", [msgspec.to_builtins(make_report(3, time=EPOCH + 9), str_keys=True)])
    for name in ("trace.json", "trace.json.gz"):
        events = written(read_run(folder), tmp_path / name)
        check(events)
        steps = read_steps(folder)
        for span in ("wait", "actor_inf", "actor_train"):
            shown = slices(events, "trainer", span)
            meant = [s for step in steps for s in step.spans if s[0] == span]
            assert [(name, begin, length) for name, begin, length in shown] == [
                (name, pytest.approx(begin - EPOCH, abs=1e-5), pytest.approx(end - begin, abs=1e-5))
                for name, begin, end in meant
            ]
        assert [name for name, _, _ in slices(events, "trainer", "steps")] == [f"step {n}" for n in range(1, 21)]
        assert len(slices(events, "weight updates", "published")) == 20
        assert slices(events, "weight updates", "evaluations") == [("evaluation of v3", 7.5, 1.5)]
        assert slices(events, "controller/0") == [("waits for # groups", 0.0, 40.0)]
        busy = sum(length for name, _, length in slices(events, "gserver/1") if name == "generates")
        assert busy == 40.0
        curves = {e["name"] for e in events if e["ph"] == "C"}
        assert {"reward_mean", "running", "queued"} <= curves


def beats(role: str, *entries: tuple[float, dict[str, float], str]) -> list[HeartbeatEntry]:
    return [
        HeartbeatEntry(time=EPOCH + time, role=role, index=0, stats=stats, waiting_for=waits)
        for time, stats, waits in entries
    ]


def test_what_processes_did(tmp_path: Path) -> None:
    def gserver(time: float, busy: float, paused: float, seconds: float) -> tuple[float, dict[str, float], str]:
        counters = {"busy_seconds_total": busy, "pause_seconds_total": paused, "processor_seconds_total": seconds}
        return time, counters, ""

    heartbeats = [
        *beats(
            "gserver",
            *(gserver(0, 0, 0, 1), gserver(1, 0.5, 0, 2), gserver(2, 1.5, 0, 3), gserver(3, 1.5, 0.9, 4)),
            *(gserver(4, 1.5, 0.9, 5), gserver(5, 1.0, 0, 0.1), gserver(30, 2.0, 0, 3), gserver(31, 3.0, 0, 4)),
        ),
        *beats(
            "rollout", *((0.5, {}, "room"), (1.5, {}, "room"), (2.5, {}, ""), (3.5, {}, "1 of 8"), (4.5, {}, "2 of 8"))
        ),
    ]
    update = PublicationEntry(
        time=EPOCH + 4, begin=EPOCH + 3, end=EPOCH + 4, pause=0.9, version=2, done=False, error="gserver/0 is gone"
    )
    events = written(view_of(tmp_path, beats=heartbeats, publications=[update]), tmp_path / "trace.json")
    check(events)
    assert slices(events, "gserver/0") == [
        ("generates", 0, 2),
        ("paused", 2, 1),
        ("idle", 3, 1),
        ("generates", 4, 1),
        ("not heard of", 5, 25),
        ("generates", 30, 1),
    ]
    assert [e["args"]["busy_share"] for e in events if e["name"] == "generates"] == [0.75, 1.0, 1.0]
    assert [(e["ts"], e["s"]) for e in events if e["name"] == "started again"] == [(5e6, "p")]
    assert slices(events, "rollout/0") == [("waits for room", 0.5, 2), ("works", 2.5, 1), ("waits for # of #", 3.5, 1)]
    assert slices(events, "weight updates", "rolled back") == [("v2 failed", 3, 1)]
    (failed,) = [e for e in events if e["name"] == "v2 failed"]
    assert failed["args"] == {"pause_seconds": 0.9, "error": "gserver/0 is gone"}


def test_changes_of_health_are_marked(tmp_path: Path) -> None:
    def step(number: int, health: Health) -> StepReport:
        return StepReport(step=number, time=EPOCH + number, metrics={}, token_ages={}, health=health)

    ill = Health(state="warning", since=2, signs=["ratios"])
    steps = [step(1, Health()), step(2, ill), step(3, ill), step(4, Health(since=4))]
    events = written(view_of(tmp_path, steps=steps), tmp_path / "trace.json")
    check(events)
    marks = [(e["name"], e["ts"] / 1e6, e["args"]["signs"]) for e in events if e["ph"] == "i"]
    assert marks == [("policy warning", 1.0, "ratios"), ("policy healthy", 3.0, "")]


numbers = st.floats(0, 1e9)


@given(
    beats=st.lists(
        st.tuples(
            st.sampled_from(["gserver", "rollout", "controller", "odd"]),
            numbers,
            st.dictionaries(
                st.sampled_from(["busy_seconds_total", "pause_seconds_total", "running", "processor_seconds_total"]),
                st.floats(),
            ),
            st.text(max_size=8),
        ),
        max_size=20,
    ),
    spans=st.lists(st.tuples(st.sampled_from(["wait", "ref_inf", "publish"]), numbers, numbers), max_size=12),
    updates=st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=6),
)
@settings(max_examples=80, deadline=None)
def test_any_run_gives_a_valid_trace(
    tmp_path_factory: pytest.TempPathFactory,
    beats: list[tuple[str, float, dict[str, float], str]],
    spans: list[tuple[str, float, float]],
    updates: list[tuple[float, float, bool]],
) -> None:
    """Overlapping spans, clocks that disagree, figures that are no numbers."""
    heartbeats = [
        HeartbeatEntry(time=time, role=role, index=0, stats=stats, waiting_for=waits)
        for role, time, stats, waits in sorted(beats, key=lambda beat: beat[1])
    ]
    step = StepReport(step=1, time=2e9, metrics={"reward_mean": float("nan")}, token_ages={}, spans=spans)
    publications = [
        PublicationEntry(time=a + b, begin=a, end=a + b, pause=0.0, version=1, done=done, error="")
        for a, b, done in sorted(updates)
    ]
    folder = tmp_path_factory.mktemp("trace")
    run = view_of(folder, beats=heartbeats, steps=[step] if spans else [], publications=publications)
    events = written(run, folder / "trace.json")
    check(events)
    for process in run.processes.values():  # the whole time of each process is accounted for
        covered = sum(length for _, _, length in slices(events, process.name))
        assert covered == pytest.approx(process.times[-1] - process.times[0], rel=1e-6, abs=1e-3)
