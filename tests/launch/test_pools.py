"""Pools started by hand, each by its own command, meet at the controller's URL."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest

from streamrl.config import load
from streamrl.errors import PeerError, StreamRLError
from streamrl.launch.children import Children
from streamrl.launch.pool import PoolShare
from streamrl.launch.process import EXIT_PLACE_TAKEN
from streamrl.launch.processes import ProcessCommands, ProcessPlan
from streamrl.launch.supervisor import Supervisor
from streamrl.records import lineage as lineages
from streamrl.records.metrics import StepReport
from streamrl.transport.control import AskPlace, Drain, Status
from streamrl.transport.manager_client import ControlClient
from tests.e2e.harness import Command, calling, start_command, summary, until
from tests.e2e.preloaded import run_command
from tests.launch.run_standins import use_standins
from tests.launch.statuses import status
from tests.processes import lives

PATIENCE = 30.0

Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command whose children, if it has any, are stand-ins."""
    variables = {"COLUMNS": "200", **calling(use_standins, tmp_path)}
    started: list[Command] = []

    def begin(*words: str) -> Command:
        started.append(start_command(words, variables=variables))
        return started[-1]

    yield begin
    for command in started:
        command.end()


def configuration(folder: Path, controller: str) -> str:
    file = folder / "config.toml"
    file.write_text(f'[run]\nname = "trial"\ndir = "{folder}/runs"\n[data.args]\ncontroller = "{controller}"\n')
    (folder / "runs" / "trial").mkdir(parents=True)
    return str(file)


def start_controller(start: Start, config: str, *settings: str) -> tuple[Command, str]:
    controller = start("controller", config, *settings)
    until(lambda: told(controller) or not controller.running, "the controller's URL", seconds=PATIENCE)
    (url,) = told(controller)
    return controller, url


def told(controller: Command) -> set[str]:
    return set(re.findall(r"--manager (http://127\.0\.0\.1:\d+)\b", controller.output))


def member(start: Start, role: str, config: str, url: str) -> Command:
    return start(role, config, "--manager", url)


def test_a_run_of_pools(start: Start, tmp_path: Path) -> None:
    config = configuration(tmp_path, "finish")
    controller, url = start_controller(start, config, "run.seed=5")
    assert f"  streamrl trainer {config} run.seed=5 --manager {url}" in controller.output
    others = [member(start, role, config, url) for role in ("gserver", "rollout", "trainer")]
    for process in others:
        process.ends_well(seconds=PATIENCE)
    assert "run trial" in controller.ends_well(seconds=PATIENCE)


def test_a_trainer_pool_that_is_stopped_or_breaks(start: Start, tmp_path: Path) -> None:
    config = configuration(tmp_path, "wait")
    controller, url = start_controller(start, config)

    status = start("status", "--manager", url)
    status.ends_well(seconds=PATIENCE)
    assert "streamrl · trial" in status.output
    assert "gserver/0  live" in status.output

    trainer = start("trainer", config, "data.args.model_worker=raise", "--manager", url)
    assert trainer.exit_code(seconds=PATIENCE) == 1
    assert "ModelError: the model of model_worker is broken" in trainer.output
    assert "error: model_worker/0" in trainer.output

    trainer = start("trainer", config, "data.args.model_worker=shout", "--manager", url)
    until(lambda: "model_worker 0 works" in trainer.output or not trainer.running, "the trainer", seconds=PATIENCE)
    assert trainer.running, trainer.output
    children = psutil.Process(trainer.pid).children()
    trainer.signal(signal.SIGINT)
    assert trainer.exit_code(seconds=PATIENCE) == 130
    assert children
    assert not any(lives(child.pid) for child in children)

    controller.signal(signal.SIGTERM)
    assert controller.exit_code(seconds=PATIENCE) == 128 + signal.SIGTERM
    assert "run trial: no training step was finished" in controller.output
    found = summary(tmp_path / "runs" / "trial")
    assert (found["state"], found["message"]) == ("stopped", "it was asked to end, by Ctrl-C or another signal")


def test_a_pool_starts_several_and_again_those_that_die(start: Start, tmp_path: Path) -> None:
    config = configuration(tmp_path, "finish")
    controller, url = start_controller(start, config)
    words = ("data.args.gserver=die-once", "restarts.delay_seconds=0.1", "--manager", url, "--count", "2")
    pool = start("gserver", config, *words)
    starts = tmp_path / "runs" / "trial" / "gserver-starts.txt"
    until(lambda: starts.exists() and len(starts.read_text().split()) >= 3, "another start", seconds=PATIENCE)
    assert "and it is restarted (1 of 5, in 0.1 s)" in pool.output
    worker, trainer = (member(start, role, config, url) for role in ("rollout", "trainer"))
    for process in (trainer, controller, worker, pool):
        process.ends_well(seconds=PATIENCE)
    assert "gserver/0 has left the run" in pool.output
    assert "gserver/1 has left the run" in pool.output


def part_of(folder: Path, *overrides: str, children: Children, client: object = None) -> PoolShare:
    """A pool of gservers that runs `children`, and whose controller answers as `client`."""
    config = load(configuration(folder, "wait"), list(overrides))
    commands = ProcessCommands(folder, manager_url="http://127.0.0.1:1")
    part = PoolShare(config, commands, role="gserver", planned=none)
    part.children, part.client = children, cast(ControlClient, cast(Any, client))
    part.supervisor = Supervisor(config, children, commands, part.client, part="pool")
    return part


async def none(client: ControlClient) -> list[ProcessPlan]:
    return []


async def test_a_pool_that_has_started_none_yet_cannot_be_left_in_order(tmp_path: Path) -> None:
    children = Children(logs=None)
    with pytest.raises(StreamRLError, match="no gserver is running here"):
        await part_of(tmp_path, children=children, client=_Run()).leave()
    await children.stop()


class _Run:
    """A client of a controller: gserver/1 has not registered, and gserver/4 is another process."""

    def __init__(self) -> None:
        self.drained: list[int] = []

    async def drain(self, message: Drain) -> None:
        if message.index == 1:
            raise PeerError("gserver/1 is not in this run; there are: gserver/0, gserver/2", status=409)
        self.drained.append(message.index)

    async def status(self) -> Status:
        return status(1)

    async def silence(self, after: int) -> None:
        await asyncio.Event().wait()

    async def place(self, message: AskPlace, *, patience: float) -> int:
        return 5


async def test_a_process_that_has_not_joined_does_not_keep_the_others_from_leaving_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    children, run = Children(logs=None), _Run()
    part = part_of(tmp_path, client=run, children=children)
    for index in range(3):
        await children.start(ProcessPlan("gserver", index, 1), ["sh", "-c", "sleep 60"])
    await part.leave()
    assert run.drained == [0, 2]
    assert (await children.next_exit()).name == "gserver/1"
    assert [child.name for child in children.running] == ["gserver/0", "gserver/2"]
    assert "gserver/1 is not in this run" in caplog.text
    await children.stop()


async def test_a_process_whose_index_another_has_is_restarted_with_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(logs=None)
    part = part_of(tmp_path, "restarts.delay_seconds=0.05", client=_Run(), children=children)
    started: list[int] = []

    async def start(process: ProcessPlan, *, died: str = "") -> None:
        started.append(process.index)
        await children.start(process, ["sh", "-c", f"exit {[1, EXIT_PLACE_TAKEN, 0][len(started) - 1]}"])

    assert part.supervisor is not None
    monkeypatch.setattr(part.supervisor, "start", start)
    await start(ProcessPlan("gserver", 4, 1, "cpu", ["0"]))
    await part.supervisor.until_over()
    assert started == [4, 4, 5]
    await children.stop()


def streamrl(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command(words, folder=Path.cwd(), environment={**os.environ, "COLUMNS": "200"})


def test_a_number_is_of_one_process(tmp_path: Path) -> None:
    words = ("--manager", "http://127.0.0.1:1", "--count", "2", "--index", "3")
    done = streamrl("gserver", configuration(tmp_path, "wait"), *words)
    assert done.returncode == 2
    assert "--index 3 is of one process; with --count 2 the controller assigns them" in done.stderr


def test_a_controller_that_cannot_listen_leaves_the_records_of_the_run_alone(tmp_path: Path) -> None:
    """With --resume they are taken back where there is no checkpoint, unless the run continues under another one."""
    config = configuration(tmp_path, "finish")
    metrics = tmp_path / "runs" / "trial" / "metrics.jsonl"
    step = msgspec.json.encode(StepReport(1, 0.0, {}, {})) + b"\n"
    metrics.write_bytes(step)
    with socket.create_server(("127.0.0.1", 0)) as other:
        refused = streamrl("controller", config, "--resume", "--port", str(other.getsockname()[1]))
    assert refused.returncode == 1
    assert "cannot listen" in refused.stderr
    assert metrics.read_bytes() == step
    assert lineages.read(metrics.parent) == []
