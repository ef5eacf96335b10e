"""Pools started by hand, each by its own command, meet at the controller's URL."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import pytest

from streamrl.config import load
from streamrl.errors import PeerError, ProcessDied, StreamRLError
from streamrl.launch.pool import Pool
from streamrl.launch.process import EXIT_PLACE_TAKEN
from streamrl.launch.processes import Helper, ProcessPlan
from streamrl.launch.supervise import Children
from streamrl.records import lineage as lineages
from streamrl.records.metrics import StepReport
from streamrl.transport.control import AskPlace, Drain, Status
from streamrl.transport.manager_client import ControlClient
from tests.e2e.harness import Command, calling, start_command, summary, until
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
    controller = start("controller", config, *settings, "--component", "tests.launch.standins:controller")
    until(lambda: told(controller) or not controller.running, "the controller's URL", seconds=PATIENCE)
    (url,) = told(controller)
    return controller, url


def told(controller: Command) -> set[str]:
    return set(re.findall(r"--manager (http://127\.0\.0\.1:\d+)\b", controller.output))


def member(start: Start, role: str, config: str, url: str, folder: Path) -> Command:
    component = f"tests.launch.standins:{role}"
    return start(role, config, "--manager", url, "--component", component, "--model-dir", str(folder))


def test_a_run_of_pools(start: Start, tmp_path: Path) -> None:
    config = configuration(tmp_path, "finish")
    controller, url = start_controller(start, config, "run.seed=5")
    assert f"  streamrl trainer {config} run.seed=5 --manager {url}" in controller.output
    others = [member(start, role, config, url, tmp_path) for role in ("gserver", "rollout")]
    trainer = start("trainer", config, "--manager", url)
    for process in (trainer, *others):
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
    assert "; it is started again in 0.1 s" in pool.output
    worker = member(start, "rollout", config, url, tmp_path)
    trainer = start("trainer", config, "--manager", url)
    for process in (trainer, controller, worker, pool):
        process.ends_well(seconds=PATIENCE)
    assert "gserver/0 has left the run" in pool.output
    assert "gserver/1 has left the run" in pool.output


async def test_a_pool_that_has_started_none_yet_cannot_be_left_in_order(tmp_path: Path) -> None:
    config = load(configuration(tmp_path, "wait"))
    pool = Pool(config, role="gserver", count=1, config_file=tmp_path, overrides=(), manager_url="http://127.0.0.1:1")
    pool._children = children = Children(logs=None)
    model = asyncio.create_task(children.ask(Helper("checkpoint", 1), ["sh", "-c", "sleep 60"], timeout=60.0))
    while not children.running:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(StreamRLError, match="no gserver is running here"):
        await pool.leave()
    await children.stop()
    with pytest.raises(ProcessDied):
        await model
    children.close()


class _RunWithoutNumberOne:
    """A client of a controller at which gserver/1 has not registered yet."""

    def __init__(self) -> None:
        self.drained: list[int] = []

    async def drain(self, message: Drain) -> None:
        if message.index == 1:
            raise PeerError("gserver/1 is not in this run; there are: gserver/0, gserver/2", status=409)
        self.drained.append(message.index)

    async def close(self) -> None:
        pass


async def test_one_that_has_not_joined_yet_does_not_keep_the_others_from_leaving_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else all would be ended with what they have, as if they could not leave."""
    config, run = load(configuration(tmp_path, "wait")), _RunWithoutNumberOne()
    monkeypatch.setattr(ControlClient, "of", lambda *arguments, **options: run)
    pool = Pool(config, role="gserver", count=3, config_file=tmp_path, overrides=(), manager_url="http://127.0.0.1:1")
    pool._children = children = Children(logs=None)
    for index in range(3):
        await children.start(ProcessPlan("gserver", index, 1, "cpu", (), ""), ["sh", "-c", "sleep 60"])
    await pool.leave()
    assert run.drained == [0, 2]
    assert (await children.next_exit()).name == "gserver/1"
    assert [child.name for child in children.running] == ["gserver/0", "gserver/2"]
    assert "gserver/1 is not in this run" in caplog.text
    await children.stop()
    children.close()


class _FinishedRun:
    """A client of the controller of a run that is over, and is well."""

    async def status(self) -> Status:
        return status(1, state="finished")


async def test_a_process_that_breaks_when_the_run_is_over_is_not_the_pools_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(configuration(tmp_path, "wait"))
    pool = Pool(config, role="gserver", count=1, config_file=tmp_path, overrides=(), manager_url="http://127.0.0.1:1")
    pool._children = children = Children(logs=None)
    await children.start(ProcessPlan("gserver", 0, 1, "cpu", (), ""), ["sh", "-c", "kill -SEGV $$"])
    await pool._until_all_have_left(children, cast(ControlClient, cast(Any, _FinishedRun())))
    assert "gserver/0 was ended by SIGSEGV when the run was over" in caplog.text
    children.close()


class _OtherRun:
    """A client of a controller that was started again, and has given number 4 to another process."""

    async def status(self) -> Status:
        return status(1, state="running")

    async def place(self, message: AskPlace, *, patience: float) -> int:
        return 5


async def test_a_process_whose_number_another_has_is_started_again_under_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(configuration(tmp_path, "wait"), ["restarts.delay_seconds=0.05"])
    pool = Pool(config, role="gserver", count=1, config_file=tmp_path, overrides=(), manager_url="http://127.0.0.1:1")
    pool._children, pool._model_dir = (children := Children(logs=None)), tmp_path
    started: list[int] = []

    async def start(process: ProcessPlan) -> None:
        started.append(process.index)
        await children.start(process, ["sh", "-c", f"exit {[1, EXIT_PLACE_TAKEN, 0][len(started) - 1]}"])

    monkeypatch.setattr(pool, "_start", start)
    await start(ProcessPlan("gserver", 4, 1, "cpu", ("0",), ""))
    await pool._until_all_have_left(children, cast(ControlClient, cast(Any, _OtherRun())))
    assert started == [4, 4, 5]
    children.close()


def test_a_number_is_of_one_process(start: Start, tmp_path: Path) -> None:
    words = ("--manager", "http://127.0.0.1:1", "--count", "2", "--index", "3")
    command = start("gserver", configuration(tmp_path, "wait"), *words)
    command.exit_code(seconds=PATIENCE)
    assert "--index 3 is of one process; with --count 2 the controller gives them numbers" in command.said


def test_a_controller_that_cannot_listen_leaves_the_records_of_the_run_alone(start: Start, tmp_path: Path) -> None:
    """With --resume they are taken back where there is no checkpoint, unless the run continues under another one."""
    config = configuration(tmp_path, "finish")
    metrics = tmp_path / "runs" / "trial" / "metrics.jsonl"
    step = msgspec.json.encode(StepReport(1, 0.0, {}, {})) + b"\n"
    metrics.write_bytes(step)
    with socket.create_server(("127.0.0.1", 0)) as other:
        refused = start("controller", config, "--resume", "--port", str(other.getsockname()[1]))
        assert refused.exit_code(seconds=PATIENCE) == 1
    assert "cannot listen" in refused.output
    assert metrics.read_bytes() == step
    assert lineages.read(metrics.parent) == []
