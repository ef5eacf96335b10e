"""Families of models without code of ours are trained, served and updated in whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.models import save_family
from tests.e2e.harness import assert_exactly_once, largest_difference, overrides, run, steps

STEPS = 3
FAMILIES = (
    *("mistral", "qwen2_moe", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "gpt_oss", "deepseek_v3"),
    *("qwen3_next", "falcon_h1"),  # layers with a state: each request and each trajectory is computed on its own
)

CONFIG = """
[data]
source = "jsonl"
max_prompt_tokens = 16
[rollout]
group_size = 4
reward.function = "streamrl.rollout.tasks:hash_reward"
sampling.max_new_tokens = 12
[gserver]
dtype = "float32"
max_running = 16
max_context = 32
[staleness]
max_staleness = 1
[trainer]
batch_groups = 4
lr = 1e-3
dtype = "float32"
save_at_end = false
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_with_its_engine(family: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "model", family)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"t{i} t{i + 1} t{i + 2}", "answer": ""}) + "\n" for i in range(40)))
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    run(config, overrides(tmp_path, "run", model__path=folder, data__path=rows, run__total_train_steps=STEPS))
    done = steps(tmp_path / "run")
    assert [step["step"] for step in done] == list(range(1, STEPS + 1))
    assert largest_difference(tmp_path / "run") < 1e-4
    assert_exactly_once(tmp_path / "run")
