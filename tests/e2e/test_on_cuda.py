"""A whole run with everything on the GPU learns: gserver, model worker, and the weights' way between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import DEVICE, ON_DEVICE
from tests.e2e.harness import COPY_SCRATCH, SMALL, assert_exactly_once, largest_difference, overrides, run, steps

pytestmark = ON_DEVICE

PATIENCE = 150.0
"""Seconds for one run."""
STEPS_ELSEWHERE = 4
"""Where this is only tried, not on a GPU: that a policy learns there is `test_learning.py`'s."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["collective", "auto"])
def test_copy_is_learned(tmp_path: Path, way: str) -> None:
    on_gpu = DEVICE.type == "cuda"
    if way == "auto" and not on_gpu:
        pytest.skip("there is no CUDA device for trainer and gserver to share")
    settings: dict[str, Any] = {} if on_gpu else {**SMALL, "run__total_train_steps": STEPS_ELSEWHERE}
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
            "weights__mode": way,
            **settings,
        },
    )
    # fresh: CUDA must not be used in processes that are forked from one that has looked for devices
    if way == "auto":  # trainer and gserver on one GPU
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "0")
            run(COPY_SCRATCH, arguments, seconds=PATIENCE, fresh=True)
    else:
        run(COPY_SCRATCH, arguments, seconds=PATIENCE, fresh=True)
    if way == "auto":
        assert "weights.mode: cuda_ipc" in (tmp_path / "run" / "logs" / "model_worker-0.log").read_text()
    assert_exactly_once(tmp_path / "run")
    assert largest_difference(tmp_path / "run") < 1e-2
    made = steps(tmp_path / "run")
    if on_gpu:
        recent = [step["metrics"]["reward_mean"] for step in made[-5:]]
        assert sum(recent) / len(recent) >= 0.9
        assert torch.cuda.is_available()
    else:
        assert len(made) == STEPS_ELSEWHERE
