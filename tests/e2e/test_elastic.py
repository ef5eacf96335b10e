"""Pools change in mid-run: a gserver and a rollout worker join by hand, others leave; nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.transport.control.client import ControlClient
from streamrl.transport.control.status import Status
from tests.e2e.harness import COPY_SCRATCH, ROOT, assert_exactly_once, overrides, processes_of, start, summary

STEPS = 16
SETTINGS = {
    # Simulated generation, whose pace does not depend on the machine: about 2.4 s for 32 responses on a gserver.
    "gserver__engine": "simulated",
    "gserver__max_running": 32,
    "gserver__simulation__token_seconds": 0.4,
    "gserver__simulation__mean_length": 6,
    "gserver__simulation__sigma": 0,
    "gserver__simulation__vocab_size": 8,
    "trainer__batch_groups": 4,
    "run__total_train_steps": STEPS,
    "run__stop_at_reward": 2.0,
    "trainer__save_at_end": "false",
}
PATIENCE = 90.0

ByHand = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[ByHand]:
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        with (tmp_path / f"by-hand-{len(started)}.log").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "streamrl", *words],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def until(url: str, ready: Callable[[Status], bool], *, seconds: float = PATIENCE) -> Status:
    async def ask() -> Status:
        client = ControlClient(url)
        try:
            return await client.status()
        finally:
            await client.close()

    deadline = time.monotonic() + seconds
    while not ready(status := asyncio.run(ask())):
        assert status.state in ("joining", "running"), status.message
        assert time.monotonic() < deadline, status.processes
        time.sleep(0.1)
    return status


def live(status: Status) -> set[str]:
    return {f"{p.role}/{p.index}" for p in status.processes if p.state == "live"}


def members(status: Status) -> set[str]:
    return {f"{p.role}/{p.index}" for p in status.processes}


def manager_of(run_dir: Path) -> str:
    """Its address, from the command line of a process that joined it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for process in processes_of(run_dir):
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "--manager" in words:
                return words[words.index("--manager") + 1]
        time.sleep(0.1)
    raise AssertionError("nobody joined")


def test_pools_grow_and_shrink_without_loss(tmp_path: Path, by_hand: ByHand) -> None:
    run_dir = tmp_path / "elastic"
    process = start(COPY_SCRATCH, overrides(tmp_path, "elastic", **SETTINGS))
    try:
        url = manager_of(run_dir)
        config = str(run_dir / "config.toml")
        gserver, rollout = (by_hand(role, config, "--manager", url) for role in ("gserver", "rollout"))

        def worked(status: Status) -> bool:
            """Whether the newcomers did some of the work."""
            stats = {f"{p.role}/{p.index}": p.stats for p in status.processes if p.state == "live"}
            return (
                stats.get("gserver/1", {}).get("requests_total", 0) > 0
                and stats.get("rollout/1", {}).get("groups_done_total", 0) > 0
            )

        until(url, worked)
        for name in ("gserver/0", "rollout/0"):
            assert by_hand("drain", url, name).wait(PATIENCE) == 0
        until(url, lambda status: {"gserver/0", "rollout/0"}.isdisjoint(members(status)))
        another = by_hand("rollout", config, "--manager", url)
        until(url, lambda status: "rollout/2" in live(status))
        rollout.send_signal(signal.SIGTERM)
        assert rollout.wait(PATIENCE) == 0, "it finished its groups and left in order"
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output[-4000:]
        assert [gserver.wait(PATIENCE), another.wait(PATIENCE)] == [0, 0]
        assert_exactly_once(run_dir)
        assert summary(run_dir)["steps"] == STEPS
    finally:
        process.kill()
        process.communicate()
