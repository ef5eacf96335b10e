"""A whole run on two real SGLang servers, in which a server is killed, and then a model worker."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from streamrl.records import lineage as lineages
from streamrl.transport.control import Status
from tests.e2e.harness import (
    COPY_SCRATCH,
    kill_second_server,
    largest_difference,
    manager_of,
    overrides,
    process_of,
    second_gserver,
    start,
    steps,
    trained_seqs,
    until,
    wait_for_status,
    wait_for_steps,
    wait_until_gone,
)
from tests.gserver.installed import sglang_python

SETTINGS = {
    "run__total_train_steps": 1000,
    "run__stop_at_reward": 2.0,
    "trainer__save_at_end": "false",
    "trainer__save_every": "2 steps",
    "trainer__batch_groups": 8,
    "rollout__group_size": 8,
    "gserver__engine": "sglang",
    "gserver__count": 2,
    "restarts__delay_seconds": 0.1,
    "limits__start_seconds": 600.0,
    "weights__pause_mode": "retract",
    "weights__mode": "collective",
}


def servers_of(status: Status) -> list[list[int]]:
    """The processes of each gserver's SGLang."""
    gservers = [psutil.Process(p.pid) for p in status.processes if p.role == "gserver"]
    return [sorted(child.pid for child in gserver.children(recursive=True)) for gserver in gservers]


@pytest.mark.timeout(1500)
@pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed")
def test_a_server_that_is_killed_comes_back_and_none_is_restarted_when_the_run_goes_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "returned"
    settings = overrides(tmp_path, "returned", **SETTINGS, gserver__sglang__python=sglang_python() or "")
    process = start(COPY_SCRATCH, settings)
    try:
        wait_for_steps(run_dir, 3, seconds=600)
        url = manager_of(run_dir)
        kill_second_server(url, seconds=200)
        servers = servers_of(wait_for_status(url, lambda status: second_gserver(status) is not None))
        wait_for_steps(run_dir, len(steps(run_dir)) + 3)
        process_of(run_dir, "model-worker").kill()
        until(lambda: lineages.read(run_dir), "the model worker to be replaced", seconds=200)
        wait_for_steps(run_dir, lineages.read(run_dir)[-1].policy_version + 5)
        assert servers_of(wait_for_status(url, lambda status: second_gserver(status) is not None)) == servers
        process.signal(signal.SIGINT)
        assert process.exit_code(seconds=60) == 130, process.output[-4000:]
        seqs = trained_seqs(run_dir)
        assert len(seqs) == len(set(seqs))
        assert "it is restarted (1 of 5, in 0.1 s)" in process.said
        made = [step["metrics"] for step in steps(run_dir)]
        assert largest_difference(run_dir) < 1e-3  # and what it scores, before and after
        assert max(metrics.get("sampling_diff_max", 0.0) for metrics in made) < 1e-3
        assert max(metrics["gservers_compared"] for metrics in made[-5:]) == 2
        wait_until_gone(run_dir, seconds=10)
    finally:
        process.end()
