"""A whole run on two real SGLang servers, one of which is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from streamrl.transport.control import ProcessStatus, Status
from tests.e2e.harness import (
    COPY_SCRATCH,
    largest_difference,
    manager_of,
    overrides,
    start,
    steps,
    trained_seqs,
    wait_for_status,
    wait_for_steps,
    wait_until_gone,
)
from tests.gserver.installed import sglang_python

SETTINGS = {
    "run__total_train_steps": 1000,
    "run__stop_at_reward": 2.0,
    "trainer__save_at_end": "false",
    "trainer__batch_groups": 8,
    "rollout__group_size": 8,
    "gserver__engine": "sglang",
    "gserver__count": 2,
    "gserver__restart_delay_seconds": 0.1,
    "weights__pause_mode": "retract",
    "weights__mode": "collective",
}


def second_gserver(status: Status) -> ProcessStatus | None:
    """gserver/1, if it takes groups."""
    return next((p for p in status.processes if (p.role, p.index, p.state) == ("gserver", 1, "live")), None)


@pytest.mark.timeout(900)
@pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed")
def test_one_of_two_sglang_servers_is_killed_and_comes_back_with_the_current_weights(tmp_path: Path) -> None:
    run_dir = tmp_path / "returned"
    settings = overrides(tmp_path, "returned", **SETTINGS, gserver__sglang__python=sglang_python() or "")
    process = start(COPY_SCRATCH, settings)
    try:
        wait_for_steps(run_dir, 3, seconds=400)
        url = manager_of(run_dir)
        before = second_gserver(wait_for_status(url, lambda status: second_gserver(status) is not None))
        assert before is not None
        (server,) = psutil.Process(before.pid).children()
        server.send_signal(signal.SIGKILL)

        def has_worked_again(status: Status) -> bool:
            now = second_gserver(status)
            return now is not None and now.pid != before.pid and now.stats.get("tokens_generated_total", 0) > 0

        wait_for_status(url, has_worked_again, seconds=400)
        wait_for_steps(run_dir, len(steps(run_dir)) + 5)
        process.signal(signal.SIGINT)
        assert process.exit_code(seconds=60) == 130, process.output[-4000:]
        seqs = trained_seqs(run_dir)
        assert len(seqs) == len(set(seqs))
        assert "it is started again (1 of 3, in 0.1 s)" in process.said
        made = [step["metrics"] for step in steps(run_dir)]
        assert largest_difference(run_dir) < 1e-3  # and what it scores, before and after
        assert max(metrics.get("sampling_diff_max", 0.0) for metrics in made) < 1e-3
        assert max(metrics["gservers_compared"] for metrics in made[-5:]) == 2
        wait_until_gone(run_dir, seconds=10)
    finally:
        process.end()
