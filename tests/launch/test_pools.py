"""Pools started by hand, each by its own command, meet at the manager's URL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(module: str, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def configuration(folder: Path, master: str) -> str:
    file = folder / "config.toml"
    file.write_text(f'[run]\nname = "trial"\ndir = "{folder}/runs"\n[data.args]\nmaster = "{master}"\n')
    (folder / "runs" / "trial").mkdir(parents=True)
    return str(file)


def start_manager(start: Start, config: str) -> tuple[subprocess.Popen[str], str]:
    manager = start("streamrl", "manager", config, "--component", "tests.launch.standins:manager")
    assert manager.stdout is not None
    told = "".join(manager.stdout.readline() for _ in range(4))
    url = re.search(r"--manager (http://127\.0\.0\.1:\d+)", told)
    assert url, told
    return manager, url[1]


def member(start: Start, role: str, config: str, url: str, folder: Path) -> subprocess.Popen[str]:
    component = f"tests.launch.standins:{role}"
    return start(
        "streamrl", role, config, "--manager", url, "--component", component, "--model-dir", str(folder)
    )  # fmt: skip


def test_a_run_of_pools(start: Start, tmp_path: Path) -> None:
    config = configuration(tmp_path, "finish")
    manager, url = start_manager(start, config)
    others = [member(start, role, config, url, tmp_path) for role in ("gserver", "rollout")]
    trainer = start("tests.launch.run_standins", "trainer", config, "--manager", url)
    output, _ = trainer.communicate(timeout=PATIENCE)
    assert trainer.returncode == 0, output
    assert "run trial" in output
    assert [process.wait(PATIENCE) for process in (manager, *others)] == [0, 0, 0]


def test_a_trainer_pool_that_is_stopped_or_breaks(start: Start, tmp_path: Path) -> None:
    config = configuration(tmp_path, "wait")
    manager, url = start_manager(start, config)

    picture, _ = start("streamrl", "status", "--manager", url).communicate(timeout=PATIENCE)
    assert "streamrl · trial" in picture
    assert "gserver/0  live" in picture

    trainer = start("tests.launch.run_standins", "trainer", config, "data.args.model_worker=raise", "--manager", url)
    output, _ = trainer.communicate(timeout=PATIENCE)
    assert trainer.returncode == 1
    assert "ModelError: the model of model_worker is broken" in output
    assert "error: model_worker/0" in output

    trainer = start("tests.launch.run_standins", "trainer", config, "data.args.model_worker=shout", "--manager", url)
    assert trainer.stdout is not None
    while "model_worker 0 works" not in trainer.stdout.readline():
        assert trainer.poll() is None
    children = psutil.Process(trainer.pid).children()
    trainer.send_signal(signal.SIGINT)
    assert trainer.wait(PATIENCE) == 130
    assert children
    assert not any(child.is_running() for child in children)

    manager.terminate()
    assert manager.wait(PATIENCE) == 128 + signal.SIGTERM


def test_a_pool_starts_several_and_again_those_that_die(start: Start, tmp_path: Path) -> None:
    config = configuration(tmp_path, "finish")
    manager, url = start_manager(start, config)
    words = ("data.args.gserver=die-once", "gserver.restart_delay_seconds=0.1", "--manager", url, "--count", "2")
    pool = start("tests.launch.run_standins", "gserver", config, *words)
    assert pool.stdout is not None
    while "; it is started again in 0.1 s" not in (line := pool.stdout.readline()):
        assert line, "the pool has ended"
    starts = tmp_path / "runs" / "trial" / "gserver-starts.txt"
    deadline = time.monotonic() + PATIENCE
    while len(starts.read_text().split()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker = member(start, "rollout", config, url, tmp_path)
    trainer = start("tests.launch.run_standins", "trainer", config, "--manager", url)
    assert [process.wait(PATIENCE) for process in (trainer, manager, worker)] == [0, 0, 0]
    output, _ = pool.communicate(timeout=PATIENCE)
    assert pool.returncode == 0, output
    assert "gserver/0 has left the run" in output
    assert "gserver/1 has left the run" in output


def test_a_number_is_of_one_process(start: Start, tmp_path: Path) -> None:
    words = ("--manager", "http://127.0.0.1:1", "--count", "2", "--index", "3")
    output, _ = start("streamrl", "gserver", configuration(tmp_path, "wait"), *words).communicate(timeout=PATIENCE)
    assert "--index 3 is of one process; with --count 2 the manager gives them numbers" in " ".join(output.split())
