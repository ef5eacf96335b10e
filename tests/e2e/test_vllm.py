"""A whole run on two real vLLM servers, one of which is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    kill_second_server,
    largest_difference,
    manager_of,
    overrides,
    run,
    start,
    steps,
    trained_seqs,
    wait_for_steps,
    wait_until_gone,
)
from tests.gserver.installed import vllm_python

SETTINGS = {
    "run__total_train_steps": 1000,
    "run__stop_at_reward": 2.0,
    "trainer__save_at_end": "false",
    "trainer__batch_groups": 8,
    "rollout__group_size": 8,
    "gserver__engine": "vllm",
    "gserver__count": 2,
    "gserver__max_running": 32,
    "restarts__delay_seconds": 0.1,
    "limits__start_seconds": 600.0,
    "weights__mode": "collective",
}
FEWEST_STEPS = 40


@pytest.mark.timeout(1500)
@pytest.mark.skipif(vllm_python() is None, reason="vLLM is not installed")
def test_a_run_learns_and_a_server_that_is_killed_comes_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "learns"
    process = start(COPY_SCRATCH, overrides(tmp_path, "learns", **SETTINGS, gserver__vllm__python=vllm_python() or ""))
    try:
        wait_for_steps(run_dir, 3, seconds=600)
        engines = kill_second_server(manager_of(run_dir), seconds=300)
        assert not any(engine.is_running() for engine in engines)
        wait_for_steps(run_dir, max(len(steps(run_dir)) + 5, FEWEST_STEPS), seconds=600)
        process.signal(signal.SIGINT)
        assert process.exit_code(seconds=60) == 130, process.output[-4000:]
        seqs = trained_seqs(run_dir)
        assert len(seqs) == len(set(seqs))
        assert largest_difference(run_dir) < 1e-3
        made = [step["metrics"] for step in steps(run_dir)]
        assert max(metrics.get("sampling_diff_max", 0.0) for metrics in made) < 1e-3
        assert max(metrics["gservers_compared"] for metrics in made[-5:]) == 2
        rewards = [metrics["reward_mean"] for metrics in made]
        assert sum(rewards[-10:]) > 1.5 * sum(rewards[:10])
        wait_until_gone(run_dir, seconds=10)
    finally:
        process.end()


@pytest.mark.timeout(900)
@pytest.mark.skipif(vllm_python() is None, reason="vLLM is not installed")
def test_an_adapter_is_served_and_resumed_from(tmp_path: Path) -> None:
    """Updates bring the adapter alone, by a broadcast and through shared memory."""
    adapter = {"model__lora__rank": 4, "weights__lora": "adapter", "trainer__lr": 2e-2}
    vllm = {"gserver__engine": "vllm", "gserver__vllm__python": vllm_python() or "", "limits__start_seconds": 600.0}
    for number, mode in enumerate(("collective", "shared_memory"), start=1):
        some = {"weights__mode": mode, "run__total_train_steps": 4 * number}
        settings = overrides(tmp_path, "adapter", **SMALL | adapter | vllm | some)
        run(COPY_SCRATCH, settings + (["--resume"] if number > 1 else []))
    made = [step["metrics"] for step in steps(tmp_path / "adapter")]
    assert len(made) == 8
    assert largest_difference(tmp_path / "adapter", share=0.5) < 1e-4  # steps of 0.1 s, two short runs
    assert max(metrics.get("sampling_diff_max", 0.0) for metrics in made) < 1e-4
    assert made[-1]["publish_bytes"] < 1e5
