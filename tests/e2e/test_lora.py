"""A whole run that trains an adapter: it is published, saved, and gone on from. That one which does not arrive is
noticed is in `test_failures`."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.harness import COPY_SCRATCH, SMALL, assert_exactly_once, largest_difference, overrides, run, steps

LORA = {"model__lora__rank": 8, "trainer__lr": 2e-2, "algorithm__kl_coef": 1e-3}


def test_an_adapter_is_trained_published_and_gone_on_from(tmp_path: Path) -> None:
    """Each part goes on from the checkpoint of the one before, which holds the adapter alone."""
    run_dir = tmp_path / "adapter"
    parts = [
        {"weights__mode": "collective", "gserver__count": 2},
        {"weights__lora": "adapter"},  # through shared memory
        {"weights__lora": "merged"},
    ]
    for number, part in enumerate(parts, start=1):
        settings = overrides(tmp_path, "adapter", **SMALL, **LORA, **part, run__total_train_steps=5 * number)
        run(COPY_SCRATCH, settings + (["--resume"] if number > 1 else []))
    assert_exactly_once(run_dir)
    made = [step["metrics"] for step in steps(run_dir)]
    assert len(made) == 15
    assert largest_difference(run_dir) < 1e-3
    assert made[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert made[-1]["kl"] > 1e-3  # the reference has stayed what it was
    final = run_dir / "checkpoints" / "final"
    assert not list(final.glob("model*.safetensors"))
    adapter = load_file(final / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() and tensor.any() for tensor in adapter.values())
