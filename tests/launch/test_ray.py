"""A run on a real Ray cluster of three nodes, which loses a node, actors and its trainer; a cluster without room."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.e2e.harness import (
    COPY_SCRATCH,
    PACED,
    Command,
    assert_none_missing,
    overrides,
    processes_of,
    start_command,
    steps,
    until,
    wait_for_steps,
    wait_until_gone,
)
from tests.processes import lives

pytest.importorskip("ray", reason="no Ray: pip install 'streamrl[ray]'")
from ray.cluster_utils import Cluster

from streamrl.config import Config
from streamrl.launch.processes import ProcessPlan
from streamrl.launch.ray import KeptChildren
from streamrl.transport.secret import Secret

CORES = 8
"""That each node claims to have."""
SETTINGS = PACED | {
    "gserver__count": 2,
    "restarts__delay_seconds": 0.1,
    "rollout__workers": 2,
    "rollout__group_size": 4,
    "limits__silence_seconds": 4,
    "trainer__save_every": "2 steps",
    "run__total_train_steps": 10000,
    "staleness__over_age": "wait",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    started = _started() or _started()
    if started is None:
        pytest.skip("this machine is too busy for Ray: its own deadlines for starting a node ran out twice")
    try:
        yield started
    finally:
        started.shutdown()


def _started() -> Cluster | None:
    """A cluster of three nodes; None if one did not come up within Ray's own deadlines."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.update({"RAY_worker_niceness": "0"})  # else everything else on the machine goes before the run
    node = {"num_cpus": CORES, "object_store_memory": 80 * 2**20}
    begun = Cluster()
    try:
        begun.add_node(include_dashboard=False, **node)
        for _ in range(2):
            begun.add_node(**node)
        begun.wait_for_nodes()
    except Exception as error:  # Ray raises no other kind
        begun.shutdown()
        if "timed out" not in str(error):
            raise
        return None
    return begun


def launch(cluster: Cluster, folder: Path, **settings: Any) -> Command:
    chosen = overrides(folder, "run", **{**SETTINGS, **settings})
    return start_command(["launch", "ray", str(COPY_SCRATCH), *chosen, "--address", cluster.address], fresh=True)


def elastic(run_dir: Path) -> dict[str, psutil.Process]:
    """The gservers and rollout workers of the run, by name; not what Ray runs their actors in."""
    found = {}
    for process in processes_of(run_dir):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            for role in {"gserver", "rollout"}.intersection(words):
                found[f"{role}/{words[words.index('--index') + 1]}"] = process
    return found


def member(run_dir: Path, role: str) -> psutil.Process | None:
    """A process of the run by its role, as on the command line."""
    for process in processes_of(run_dir):
        with contextlib.suppress(psutil.Error):
            if role in process.cmdline():
                return process
    return None


def node_of(cluster: Cluster, found: psutil.Process) -> Any:
    """The node of the cluster on which a process runs."""
    above = {parent.pid for parent in found.parents()}
    return next(node for node in cluster.list_all_nodes() if node.all_processes["raylet"][0].process.pid in above)


@pytest.mark.timeout(700)
def test_a_run_goes_on_whatever_ray_takes_away(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = launch(cluster, tmp_path)
    try:
        until(lambda: len(elastic(run_dir)) == 4 or not command.running, "the pools", seconds=200)
        wait_for_steps(run_dir, 2)

        # Half of the pools at once, with what keeps them. They are given back.
        taken = {name: process for name, process in elastic(run_dir).items() if name.endswith("/0")}
        for process in taken.values():
            process.parent().kill()
        until_back(run_dir, taken)
        wait_for_steps(run_dir, len(steps(run_dir)) + 1)

        # A whole node. What was on it is given back elsewhere.
        trainer, controller = member(run_dir, "model-worker"), member(run_dir, "controller")
        assert trainer is not None
        assert controller is not None
        needed = {cluster.head_node, node_of(cluster, trainer), node_of(cluster, controller)}
        on_nodes = {name: node_of(cluster, process) for name, process in elastic(run_dir).items()}
        away = next(node for node in on_nodes.values() if node not in needed)
        taken = {name: process for name, process in elastic(run_dir).items() if on_nodes[name] == away}
        cluster.remove_node(away, allow_graceful=False)
        until_back(run_dir, taken)
        wait_for_steps(run_dir, len(steps(run_dir)) + 1)
        assert trainer.is_running()
        assert "begun again" not in command.said

        # The trainer's processes live and die together, and the run goes on from its latest checkpoint.
        trainer.kill()
        until(lambda: "the run is begun again from" in command.said, "the run's second beginning", seconds=120)
        assert not lives(controller.pid)
        until(lambda: len(steps(run_dir)) and member(run_dir, "model-worker"), "the new trainer", seconds=120)
        wait_for_steps(run_dir, len(steps(run_dir)) + 3)

        command.signal(signal.SIGINT)
        assert command.exit_code(seconds=60) == 130, command.output
        wait_until_gone(run_dir, seconds=20)
    finally:
        command.end()
        print(command.output[-8000:])  # noqa: T201
    assert [step["step"] for step in steps(run_dir)] == list(range(1, len(steps(run_dir)) + 1))
    assert_none_missing(run_dir)
    assert "gserver/0 was ended, since Ray lost its actor" in command.said


def until_back(run_dir: Path, taken: Mapping[str, psutil.Process]) -> None:
    """Until every process that was taken away has gone, and another one is in its place."""

    def back() -> bool:
        now = elastic(run_dir)
        return all(name in now and now[name].pid != old.pid and not lives(old.pid) for name, old in taken.items())

    until(back, f"new processes for {sorted(taken)}", seconds=120)


def test_a_cluster_without_room_is_named(cluster: Cluster, tmp_path: Path) -> None:
    command = launch(cluster, tmp_path, gserver__threads=20, limits__start_seconds=2)
    assert command.exit_code() == 1, command.output
    assert "find room for the placement groups of gserver in vain: `ray status` shows" in command.said
    assert "Traceback" not in command.output


class _Remote:
    """A method of an actor, whose calls become `answer`."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    def remote(self, *words: Any) -> asyncio.Future[Any]:
        return self._answer


class _Actor:
    """An actor for which there is no node until `placed`."""

    def __init__(self) -> None:
        self.placed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.__ray_ready__ = _Remote(self.placed)
        self.ask = _Remote(self.placed)
        self.ended = _Remote(asyncio.get_running_loop().create_future())

    def actor(self, process: ProcessPlan, *arguments: str) -> _Actor:
        return self


async def test_a_controller_without_a_node_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streamrl.launch.ray.PLACE_WARNING_SECONDS", 0.01)
    actor = _Actor()
    children = KeptChildren(Config(), cast(Any, actor), tmp_path, Secret.make())
    controller = ProcessPlan("controller", 0, 1)
    waiting = asyncio.create_task(children.ask(controller, ["python"], timeout=5.0))
    await asyncio.sleep(0.2)
    assert "controller/0 waits for Ray to find a node for its actor" in caplog.text
    actor.placed.set_result((7, "http://127.0.0.1:7000"))
    assert await waiting == "http://127.0.0.1:7000"


def test_without_a_cluster_the_command_says_so(tmp_path: Path) -> None:
    words = ["launch", "ray", str(COPY_SCRATCH), *overrides(tmp_path, "run"), "--address", "127.0.0.1:1"]
    command = start_command([*words], fresh=True)
    assert command.exit_code() == 2, command.output
    assert "there is no Ray cluster at '127.0.0.1:1'" in command.said
