"""Sinks of figures: what reaches them, and that nothing that they do reaches the run."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.records import progress, sinks
from streamrl.records.metrics import METRICS_FILE, StepReport
from streamrl.records.sinks import MetricsWriter, SinkProcess, start_sinks
from tests.evaluations import make_report


def report(step: int, *, reward: float) -> StepReport:
    return StepReport(step=step, time=1000.0 + step, metrics={"reward_mean": reward}, token_ages={0: 3, 2: 1})


def configured(folder: Path, *names: str, resume_from: str | None = None) -> Config:
    tree = {"run": {"dir": str(folder), "name": "addition"}, "metrics": {"sinks": list(names), "project": "sums"}}
    if resume_from is not None:
        tree["run"]["resume_from"] = resume_from
    config = configuration.from_dict(tree)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    return config


REWARDS = [(1, 0.25), (2, 0.5), (3, 0.25), (4, 0.5)]
PASSED = [(1, 0.5), (3, 0.5)]
"""Policy version and figure, of what `write_run` writes when it is called for steps 1 and 3."""


def write_run(config: Config, *, first: int = 1) -> None:
    """Two steps and an evaluation that comes after a later step."""
    writer = MetricsWriter(config.run_dir, sinks=start_sinks(config))
    writer.write(report(first, reward=0.25))
    writer.write(report(first + 1, reward=0.5))
    writer.write_evaluation(make_report(first, pass_at={1: 0.25, 2: 0.5}))
    writer.close(timeout=120)


def pretend(folder: Path, package: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the sinks' processes import `source` for `package`."""
    (folder / f"{package}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


# --- what arrives ---


def test_tensorboard_shows_steps_ages_and_evaluations(tmp_path: Path) -> None:
    config = configured(tmp_path, "tensorboard")
    write_run(config)
    events = EventAccumulator(str(config.run_dir / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value, e.wall_time) for e in events.Scalars("reward_mean")] == [(1, 0.25, 1001), (2, 0.5, 1002)]
    assert events.Scalars("token_age/2")[0].value == 0.25
    assert [(e.step, e.value) for e in events.Scalars("evaluation/pass@1")] == [(1, 0.25)]


def test_tensorboard_forgets_the_steps_that_a_resumed_run_makes_again(tmp_path: Path) -> None:
    config = configured(tmp_path, "tensorboard")
    write_run(config)
    progress.rewind(config.run_dir, policy_version=1)
    write_run(configured(tmp_path, "tensorboard", resume_from="somewhere"), first=2)
    events = EventAccumulator(str(config.run_dir / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [(1, 0.25), (2, 0.25), (3, 0.5)]


def wandb_records(file: Path) -> Iterator[Any]:
    """What Weights & Biases has written to `file`: LevelDB's log format behind 7 bytes, a `Record` in each entry."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, entry = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        length, part = struct.unpack_from("<HB", data, place + 4)
        if not part or 32768 - place % 32768 < 7:  # the rest of a block that has no room for another part
            place += 32768 - place % 32768
            continue
        entry += data[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield Record.FromString(entry)
            entry = b""


def test_wandb_has_them_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = configured(tmp_path, "wandb")
    write_run(config)
    write_run(configured(tmp_path, "wandb", resume_from="somewhere"), first=3)
    runs, history, settings = set(), [], {}
    for file in sorted(config.run_dir.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(file):
            if record.HasField("run"):
                runs.add((record.run.project, record.run.display_name, record.run.run_id))
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                history.append({name: json.loads(value) for name, value in row.items()})
    ((project, name, _),) = runs  # a resumed run is the same one
    assert (project, name) == ("sums", "addition")
    assert settings["staleness"]["max_staleness"] == config.staleness.max_staleness
    assert [(r["policy_version"], r["reward_mean"]) for r in history if "reward_mean" in r] == REWARDS
    assert [(r["policy_version"], r["evaluation/pass@2"]) for r in history if "evaluation/pass@2" in r] == PASSED


def test_trackio_has_them_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    config = configured(tmp_path, "trackio")
    write_run(config)
    write_run(configured(tmp_path, "trackio", resume_from="somewhere"), first=3)
    with sqlite3.connect(tmp_path / "trackio" / "sums.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
    assert {name for name, _, _ in rows} == {"addition"}
    figures = [(step, json.loads(values)) for _, step, values in rows]
    assert [(step, row["reward_mean"]) for step, row in figures if "reward_mean" in row] == REWARDS
    assert [(step, row["evaluation/pass@2"]) for step, row in figures if "evaluation/pass@2" in row] == PASSED


# --- what goes wrong ---


def test_a_package_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sinks.importlib.util.find_spec
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=r'metrics\.sinks: .* pip install "streamrl\[wandb\]"'):
        start_sinks(configured(tmp_path, "tensorboard", "wandb"))
    assert set(psutil.Process().children()) <= set(before)


BROKEN = {
    "as it begins": """
        def init(*args, **kwargs):
            raise RuntimeError("nobody is at home")
    """,
    "later": """
        class Run:
            def log(self, figures, step):
                raise RuntimeError("nobody is at home")
            def finish(self):
                pass
        def init(*args, **kwargs):
            return Run()
    """,
    "by leaving": """
        import os
        def init(*args, **kwargs):
            os._exit(3)
    """,
}


@pytest.mark.parametrize("when", BROKEN)
def test_a_sink_that_fails_is_named_and_the_run_goes_on(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(tmp_path, "trackio", BROKEN[when], monkeypatch)
    config = configured(tmp_path / "runs", "trackio", "tensorboard")
    writer = MetricsWriter(config.run_dir, sinks=start_sinks(config))
    writer.write(report(1, reward=0.25))
    writer.close(timeout=60)
    assert "trackio ended with exit code" in caplog.text
    assert "tensorboard" not in caplog.text
    assert (config.run_dir / METRICS_FILE).read_bytes().count(b"\n") == 1


HANGING = """
    import threading, pathlib, os
    class Run:
        def log(self, figures, step):
            pathlib.Path(os.environ["REACHED"]).touch()
            threading.Event().wait()
    def init(*args, **kwargs):
        return Run()
"""


def test_a_sink_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More is told than its pipe holds."""
    pretend(tmp_path, "trackio", HANGING, monkeypatch)
    monkeypatch.setenv("REACHED", str(tmp_path / "reached"))
    config = configured(tmp_path / "runs", "trackio")
    (sink,) = start_sinks(config)
    writer = MetricsWriter(config.run_dir, sinks=[sink])
    writer.write(report(1, reward=0.25))
    until((tmp_path / "reached").exists, "the sink to hang")
    for _ in range(70_000):
        sink.tell()
    writer.write(report(2, reward=0.25))
    writer.close(timeout=0.2)
    assert "trackio has not taken all figures" in caplog.text
    assert not psutil.pid_exists(sink.pid)
    assert (config.run_dir / METRICS_FILE).read_bytes().count(b"\n") == 2


def test_a_sink_that_is_slow_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(sinks, "SLOW_SECONDS", 0.01)
    with sinks._or_exit("trackio", "the figures of step 3"):
        until(lambda: caplog.records, "a warning")
    assert "trackio has not taken the figures of step 3 for 0 s; the run continues" in caplog.text


def test_a_sink_ends_with_a_run_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, "trackio", HANGING, monkeypatch)
    monkeypatch.setenv("REACHED", str(tmp_path / "reached"))
    config = configured(tmp_path / "runs", "trackio")
    (tmp_path / "config.toml").write_text(configuration.to_toml(config))
    script = """
        import sys, time
        from streamrl import config
        from streamrl.records.sinks import MetricsWriter, start_sinks
        from tests.records.test_sinks import report
        found = config.load(sys.argv[1])
        sinks = start_sinks(found)
        MetricsWriter(found.run_dir, sinks=sinks).write(report(1, reward=0.5))
        print(sinks[0].pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "config.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        until((tmp_path / "reached").exists, "the sink to hang")
        run.send_signal(signal.SIGKILL)
        run.wait(30)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "the end of the sink")


# --- its settings ---


def test_one_that_is_named_twice_is_one(tmp_path: Path) -> None:
    started = start_sinks(configured(tmp_path, "tensorboard", "tensorboard"))
    assert [sink.name for sink in started] == ["tensorboard"]
    MetricsWriter(tmp_path, sinks=started).close(timeout=60)
    assert isinstance(started[0], SinkProcess)
