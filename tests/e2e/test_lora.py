"""A whole run that trains an adapter: it is published, saved, and gone on from. That one which does not arrive is
noticed is in `test_failures`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.harness import COPY_SCRATCH, SMALL, assert_exactly_once, largest_difference, overrides, run, steps
from tests.gserver.installed import sglang_python

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
    brought = [metrics["publish_bytes"] for metrics in made]
    assert max(brought[:10]) < min(brought[10:]) / 3, "the adapter alone, until it is merged"
    assert made[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert made[-1]["kl"] > 1e-3  # the reference has stayed what it was
    final = run_dir / "checkpoints" / "final"
    assert not list(final.glob("model*.safetensors"))
    adapter = load_file(final / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() and tensor.any() for tensor in adapter.values())


@pytest.mark.timeout(600)
@pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed")
def test_at_staleness_zero_each_request_to_sglang_names_the_adapter_that_is_served(tmp_path: Path) -> None:
    """Steps take less time than lies between two heartbeats, from which versions are learned otherwise."""
    run_dir = tmp_path / "named"
    settings = overrides(
        tmp_path,
        "named",
        **SMALL,
        model__lora__rank=8,
        trainer__lr=2e-2,
        trainer__save_at_end="false",
        run__total_train_steps=6,
        staleness__max_staleness=0,
        gserver__engine="sglang",
        gserver__sglang__python=sglang_python() or "",
        evaluation__every="1 step",
        evaluation__prompts=4,
    )
    run(COPY_SCRATCH, settings, seconds=500)
    made = steps(run_dir)
    assert [step["metrics"].get("tokens_masked") for step in made] == [0] * 6
    assert [set(step["token_ages"]) for step in made] == [{"0"}] * 6
    assert largest_difference(run_dir) < 1e-3
    found = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert found
    assert all(evaluation["oldest_version"] >= evaluation["policy_version"] for evaluation in found)
