"""A whole run on two real SGLang servers, one of which is killed."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from streamrl.transport.control.status import ProcessStatus, Status
from tests.e2e.harness import COPY_SCRATCH, largest_difference, overrides, start, steps, trained_seqs
from tests.e2e.test_elastic import manager_of, until
from tests.e2e.test_failures import collected, wait_for_steps, wait_until_gone
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


LIES = """
import sys

if "manager" in sys.orig_argv:
    from streamrl.gserver.weight_calls import WeightCalls

    async def load(self, gserver, folder, *, version, flush_cache):
        pass

    WeightCalls.load = load
"""
"""As `sitecustomize.py`: SGLang is told the name of the new weights, and never to load them."""


def second_gserver(status: Status) -> ProcessStatus | None:
    """gserver/1, if it takes groups."""
    return next((p for p in status.processes if (p.role, p.index, p.state) == ("gserver", 1, "live")), None)


@pytest.mark.timeout(900)
@pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed")
def test_one_of_two_sglang_servers_is_killed_and_comes_back_with_the_current_weights(tmp_path: Path) -> None:
    run_dir = tmp_path / "returned"
    settings = overrides(tmp_path, "returned", **SETTINGS, gserver__sglang__python=sglang_python() or "")
    process = start(COPY_SCRATCH, settings)
    reader, output = collected(process)
    try:
        wait_for_steps(run_dir, 3, seconds=400)
        url = manager_of(run_dir)
        before = second_gserver(until(url, lambda status: second_gserver(status) is not None))
        assert before is not None
        (server,) = psutil.Process(before.pid).children()
        server.send_signal(signal.SIGKILL)

        def has_worked_again(status: Status) -> bool:
            now = second_gserver(status)
            return now is not None and now.pid != before.pid and now.stats.get("tokens_generated_total", 0) > 0

        until(url, has_worked_again, seconds=400)
        wait_for_steps(run_dir, len(steps(run_dir)) + 5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, "".join(output)[-4000:]
        reader.join(10)
        seqs = trained_seqs(run_dir)
        assert len(seqs) == len(set(seqs))
        said = " ".join("".join(output).split())
        assert "it is started again (1 of 3, in 0.1 s)" in said
        made = [step["metrics"] for step in steps(run_dir)]
        assert largest_difference(run_dir) < 1e-3  # and what it scores, before and after
        assert max(metrics.get("sampling_diff_max", 0.0) for metrics in made) < 1e-3
        assert max(metrics["gservers_compared"] for metrics in made[-5:]) == 2
        wait_until_gone(run_dir, seconds=10)
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
@pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed")
def test_a_server_that_keeps_its_old_weights_is_named_within_two_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    settings = overrides(
        tmp_path,
        "lies",
        **SETTINGS
        | {
            "gserver__count": 1,
            "gserver__sglang__python": sglang_python() or "",
            "staleness__max_staleness": 4,
            "trainer__logprob_diff_warning": 0.005,
            "trainer__logprob_diff_limit": 0.01,
            "weights__mode": "disk",
            "weights__checksum": "false",  # which would tell that nothing came
        },
    )
    process = start(COPY_SCRATCH, settings)
    reader, output = collected(process)
    try:
        assert process.wait(500) == 1, "".join(output)[-4000:]
        reader.join(10)
        said = " ".join("".join(output).split())
        assert re.search(r"gserver/0 and the trainer differ by \S+ nats for each token[^:]*, under version [12],", said)
        made = [step["metrics"] for step in steps(tmp_path / "lies")]
        assert made[0]["logprob_diff_max"] < 1e-3, "before the first update they agree"
        assert 2 <= len(made) <= 3
    finally:
        process.kill()
        process.wait()
