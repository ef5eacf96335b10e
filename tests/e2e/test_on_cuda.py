"""A whole run with everything on the GPU learns: gserver, model worker, and the weights' way between them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.devices import DEVICE, ON_DEVICE, needs_nccl_ranks
from tests.e2e.harness import COPY_SCRATCH, SMALL, assert_exactly_once, largest_difference, overrides, run, steps
from tests.gserver.installed import sglang_python

pytestmark = ON_DEVICE

ON_GPU = DEVICE.type == "cuda"
PATIENCE = 150.0
"""Seconds for one run."""
STEPS_ELSEWHERE = 4
"""Where this is only tried, not on a GPU: that a policy learns there is `test_learning.py`'s."""
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="there is no CUDA device for trainer and gserver to share")
NEEDS_SGLANG = pytest.mark.skipif(not ON_GPU or sglang_python() is None, reason="there is no SGLang for a CUDA device")
SGLANG_ARGS = os.environ.get("STREAMRL_SGLANG_ARGS", "").split()
"""Further flags of SGLang's server, for an installation that lacks some of its kernels."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["embedded", pytest.param("sglang", marks=NEEDS_SGLANG)])
@pytest.mark.parametrize(
    "weights",
    [
        "collective",
        pytest.param("auto", marks=NEEDS_GPU),
        pytest.param("collective nccl", marks=[NEEDS_GPU, needs_nccl_ranks(2)]),
    ],
)
def test_copy_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, engine: str) -> None:
    mode, _, backend = weights.partition(" ")
    settings: dict[str, Any] = {} if ON_GPU else {**SMALL, "run__total_train_steps": STEPS_ELSEWHERE}
    if backend:
        settings["weights__backend"] = backend
    if engine == "sglang":
        settings |= {"gserver__engine": engine, "gserver__sglang__python": sglang_python()}
        settings["gserver__sglang__args"] = str(SGLANG_ARGS).replace("'", '"')
    arguments = overrides(
        tmp_path,
        "run",
        **{
            "run__device": DEVICE.type,
            "run__total_train_steps": 320,
            "run__stop_at_reward": 0.9,
            "trainer__dtype": "float32",
            "gserver__dtype": "float32",
            "trainer__save_at_end": "false",
            "weights__mode": mode,
            **settings,
        },
    )
    if mode == "auto" or backend:  # trainer and gserver on one GPU
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    # fresh: CUDA must not be used in processes that are forked from one that has looked for devices
    run(COPY_SCRATCH, arguments, seconds=PATIENCE, fresh=True)
    log = (tmp_path / "run" / "logs" / "model_worker-0.log").read_text()
    if mode == "auto" and engine == "embedded":
        assert "weights.mode: cuda_ipc" in log
    assert_exactly_once(tmp_path / "run")
    assert largest_difference(tmp_path / "run") < 1e-2
    made = steps(tmp_path / "run")
    if ON_GPU:
        recent = [step["metrics"]["reward_mean"] for step in made[-5:]]
        assert sum(recent) / len(recent) >= 0.9
    else:
        assert len(made) == STEPS_ELSEWHERE
