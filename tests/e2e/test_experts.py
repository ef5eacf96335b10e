"""A whole run of a model with experts, spread over two model workers by Megatron, with routing replayed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamrl import config as configuration
from streamrl.models import initial_checkpoint, vocab_size
from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    assert_exactly_once,
    largest_difference,
    overrides,
    run,
    steps,
)


def model_with_experts(folder: Path, run_settings: list[str]) -> Path:
    """With the tokenizer of the scratch policy."""
    base = initial_checkpoint(configuration.load(COPY_SCRATCH, run_settings))
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": vocab_size(base)}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, **experts)).save_pretrained(folder)
    return folder


def test_experts_spread_over_two_model_workers(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    settings = overrides(
        tmp_path,
        "experts",
        **SMALL,
        run__total_train_steps=3,
        trainer__backend="megatron",
        trainer__data_parallel=2,
        trainer__expert_parallel=2,
        weights__mode="collective",
    )
    model = model_with_experts(tmp_path / "model", settings)
    example = tmp_path / "example.toml"
    example.write_text(re.sub(r"\[model\.scratch\][^\[]*", "", COPY_SCRATCH.read_text()))
    run(example, [*settings, f"model.path={model}"])
    assert_exactly_once(tmp_path / "experts")
    made = steps(tmp_path / "experts")
    assert len(made) == 3
    assert largest_difference(tmp_path / "experts") < 1e-3
    assert all(step["metrics"]["expert_load"] > 1 for step in made)
    assert all(step["metrics"]["routing_known_share"] == 1 for step in made)
    last, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "experts" / "checkpoints" / "final", output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    first = AutoModelForCausalLM.from_pretrained(model).state_dict()
    moved = {name for name, weight in last.state_dict().items() if not torch.equal(weight, first[name])}
    assert moved == set(first)
