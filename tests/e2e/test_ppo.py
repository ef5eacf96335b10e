"""Whole runs of other graphs: synchronous PPO with a critic and a reward model, the user's own functions, Megatron."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamrl import config as configuration
from streamrl.models import initial_checkpoint, vocab_size
from streamrl.records import lineage as lineages
from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    assert_exactly_once,
    assert_none_missing,
    largest_difference,
    overrides,
    process_of,
    run,
    start,
    steps,
    summary,
    wait_for_steps,
)
from tests.trainer.models import save_weights

THREE_STEPS = SMALL | {"run__total_train_steps": 3}
PPO_SCRATCH = COPY_SCRATCH.with_name("ppo_scratch.toml")
CRITIC: dict[str, Any] = {"algorithm__advantage": "gae", "algorithm__kl_coef": 0.05, "critic__lr": 1e-3}


def reward_model(folder: Path, run_settings: list[str]) -> Path:
    """Make a judge with a random head of the scratch policy."""
    base = initial_checkpoint(configuration.load(COPY_SCRATCH, run_settings))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    save_weights(folder, model.named_parameters(), source=base, scalar_head=True)
    return folder


def test_synchronous_ppo_with_a_reward_model_survives_a_rollout_worker_and_a_model_worker(tmp_path: Path) -> None:
    settings = overrides(
        tmp_path,
        "ppo",
        **SMALL,
        **CRITIC,
        run__total_train_steps=8,
        run__stop_at_reward=1e9,
        trainer__graph="synchronous",
        staleness__max_staleness=0,
        rollout__workers=2,
        trainer__data_parallel=2,
        trainer__shard="true",
        trainer__offload='["ref", "critic"]',
        trainer__save_every="1 step",
        restarts__delay_seconds=0.01,
        algorithm__kl_in="reward",
        algorithm__kl_estimator="k1",
        algorithm__ref_update_every=3,
        algorithm__minibatches=2,
        limits__silence_seconds=2,
        evaluation__at_start="true",
        evaluation__at_end="true",
        evaluation__prompts=16,
    )
    run_dir = tmp_path / "ppo"
    judge = reward_model(tmp_path / "judge", settings)
    settings.append(f"reward_model.path={judge}")
    process = start(COPY_SCRATCH, settings)
    wait_for_steps(run_dir, 1)
    process_of(run_dir, "rollout").kill()
    wait_for_steps(run_dir, 3)
    process_of(run_dir, "model-worker").kill()
    process.ends_well()
    assert_exactly_once(run_dir)
    assert_none_missing(run_dir)
    assert len(lineages.read(run_dir)) == 1
    assert summary(run_dir)["oldest_token_age"] == 0
    made = steps(run_dir)
    assert [step["step"] for step in made] == list(range(1, 9))
    for step in made:
        began = {name: begin for name, begin, _ in step["spans"]}
        calls = ["actor_gen", "rew_inf", "ref_inf", "actor_inf", "critic_inf", "critic_train", "actor_train"]
        assert began.keys() >= set(calls)
        assert began["actor_gen"] < began["rew_inf"] < began["actor_inf"] < began["actor_train"]
        assert step["metrics"]["critic/loss"] > 0
        assert step["metrics"]["reward_std"] > 0  # no verifier ran: these are the model's
        assert step["metrics"]["sampling_diff_max"] < 1e-3
    assert largest_difference(run_dir) < 1e-3
    reports = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [(report["policy_version"], report["rejected"]) for report in reports] == [(0, 0), (8, 0)]
    kept = run_dir / "checkpoints" / "final"
    first = load_file(initial_checkpoint(configuration.load(COPY_SCRATCH, settings)) / "model.safetensors")
    last, reference = (load_file(folder / "model.safetensors") for folder in (kept, kept / "ref"))
    assert (kept / "critic" / "model.safetensors").is_file()
    for name, weight in reference.items():  # it became version 6, and the policy has made two steps since
        assert not torch.equal(weight, first[name])
        assert not torch.equal(weight, last[name])


def test_a_users_function_gives_advantages_to_the_scores_of_a_reward_model(tmp_path: Path) -> None:
    settings = overrides(tmp_path, "judged", **THREE_STEPS, trainer__graph="tests.trainer.test_graph:users_graph")
    judge = reward_model(tmp_path / "judge", settings)
    run(COPY_SCRATCH, [*settings, f"reward_model.path={judge}"])
    assert_exactly_once(tmp_path / "judged")
    assert (tmp_path / "judged" / "checkpoints" / "step-000002" / "model.safetensors").is_file()  # the graph's hook
    for step in steps(tmp_path / "judged"):
        assert {"length_penalty", "actor_train"} <= {name for name, _, _ in step["spans"]}
        assert step["metrics"]["reward_mean"] not in (0.0, 1.0)
        assert step["metrics"]["grad_norm"] > 0


def test_synchronous_ecs_functions_have_the_losses_of_the_built_in_graph(tmp_path: Path) -> None:
    exact = {"gserver__deterministic": "true", "staleness__max_staleness": 0, "trainer__save_at_end": "false"}
    for graph in ("synchronous", "synchronous:examples.ecs_ppo:workflow"):
        run(PPO_SCRATCH, overrides(tmp_path, graph, **THREE_STEPS, **exact, trainer__graph=graph))
    built_in, ecs = (steps(tmp_path / graph) for graph in ("synchronous", "synchronous:examples.ecs_ppo:workflow"))
    assert len(built_in) == 3
    for want, got in zip(built_in, ecs, strict=True):
        assert got["seqs"] == want["seqs"]
        for name in ("loss", "grad_norm", "kl", "critic/loss", "reward_mean"):
            assert got["metrics"].get(name) == want["metrics"].get(name), name
        assert got["metrics"]["critic/loss"] > 0


def model_with_experts(folder: Path, run_settings: list[str]) -> Path:
    """Make a model with experts that has the tokenizer of the scratch policy."""
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
        **THREE_STEPS,
        trainer__backend="megatron",
        trainer__data_parallel=2,
        trainer__expert_parallel=2,
        weights__mode="collective",
        staleness__max_staleness=0,  # the trainer repeats the experts that sampled a token, of an older router if stale
    )
    model = model_with_experts(tmp_path / "model", settings)
    example = tmp_path / "example.toml"
    example.write_text(re.sub(r"\[model\.scratch\][^\[]*", "", COPY_SCRATCH.read_text()))
    run(example, [*settings, f"model.path={model}"])
    assert_exactly_once(tmp_path / "experts")
    assert largest_difference(tmp_path / "experts") < 1e-3
    for step in steps(tmp_path / "experts"):
        assert step["metrics"]["expert_load"] > 1
        assert step["metrics"]["routing_known_share"] == 1
    first, last = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "experts" / "checkpoints" / "final")
    )
    assert first.keys() == last.keys()
    assert not [name for name, weight in last.items() if torch.equal(weight, first[name])]


def test_four_workers_share_models_in_three_ways(tmp_path: Path) -> None:
    """Actor and critic by Megatron, tensor and pipeline parallel; the reference by torch, data-parallel."""
    pytest.importorskip("megatron.core")
    settings = overrides(
        tmp_path,
        "four",
        **THREE_STEPS,
        **CRITIC,
        trainer__backend="megatron",
        trainer__tensor_parallel=2,
        trainer__pipeline_parallel=2,
        trainer__roles__ref__backend="torch",
        weights__mode="collective",
        trainer__roles__critic__data_parallel=2,
        trainer__roles__critic__tensor_parallel=2,
        algorithm__ref_update_every=1,
        rollout__sampling__temperature=0.8,  # gservers score at 1
    )
    run(COPY_SCRATCH, settings)
    assert_exactly_once(tmp_path / "four")
    assert largest_difference(tmp_path / "four") < 1e-3
    assert all(step["metrics"]["critic/loss"] > 0 for step in steps(tmp_path / "four"))
    kept = tmp_path / "four" / "checkpoints" / "final"
    # the reference took over the policy's weights after the last step
    last, reference = (load_file(folder / "model.safetensors") for folder in (kept, kept / "ref"))
    assert all(torch.equal(last[name], weight) for name, weight in reference.items())
