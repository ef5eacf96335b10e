"""Whole runs of other graphs than the default: synchronous PPO with a critic, a reward model, the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from streamrl import config as configuration
from streamrl.models import initial_checkpoint
from tests.e2e.harness import (
    COPY_SCRATCH,
    SMALL,
    assert_exactly_once,
    largest_difference,
    overrides,
    process_of,
    run,
    start,
    steps,
    summary,
    trained_seqs,
    wait_for_steps,
)
from tests.trainer.models import save_weights

THREE_STEPS = SMALL | {"run__total_train_steps": 3}
PPO_SCRATCH = COPY_SCRATCH.with_name("ppo_scratch.toml")


def test_synchronous_ppo_is_the_masters_from_generation_on_though_a_rollout_worker_is_killed(tmp_path: Path) -> None:
    settings = overrides(
        tmp_path,
        "ppo",
        **THREE_STEPS,
        trainer__graph="synchronous",
        staleness__max_staleness=0,
        rollout__workers=2,
        trainer__data_parallel=2,
        trainer__shard="true",
        trainer__offload='["ref", "critic"]',
        algorithm__advantage="gae",
        algorithm__kl_coef=0.05,
        algorithm__kl_in="reward",
        algorithm__kl_estimator="k1",
        algorithm__ref_update_every=2,
        algorithm__minibatches=2,
        critic__lr=1e-3,
        limits__silence_seconds=2,
    )
    process = start(COPY_SCRATCH, settings)
    wait_for_steps(tmp_path / "ppo", 1)
    process_of(tmp_path / "ppo", "rollout").kill()  # what it was told to generate is made up for
    process.ends_well()
    assert_exactly_once(tmp_path / "ppo")
    assert sorted(trained_seqs(tmp_path / "ppo")) == list(range(3 * 8))
    assert summary(tmp_path / "ppo")["oldest_token_age"] == 0
    made = steps(tmp_path / "ppo")
    assert len(made) == 3
    for step in made:
        began = {name: begin for name, begin, _ in step["spans"]}
        calls = ["actor_gen", "rew_inf", "ref_inf", "actor_inf", "critic_inf", "critic_train", "actor_train"]
        assert began.keys() >= set(calls)
        assert began["actor_gen"] < began["rew_inf"] < began["actor_inf"] < began["actor_train"]
        assert step["metrics"]["critic/loss"] > 0
        assert step["metrics"]["sampling_diff_max"] < 1e-3
    assert largest_difference(tmp_path / "ppo") < 1e-3
    kept = tmp_path / "ppo" / "checkpoints" / "final"
    for folder in (kept, kept / "critic", kept / "ref"):
        assert (folder / "model.safetensors").is_file()
    first = load_file(initial_checkpoint(configuration.load(COPY_SCRATCH, settings)) / "model.safetensors")
    last, reference = (load_file(folder / "model.safetensors") for folder in (kept, kept / "ref"))
    for name, weight in reference.items():  # it became version 2, and the policy has made a step since
        assert not torch.equal(weight, first[name])
        assert not torch.equal(weight, last[name])


def test_four_workers_share_models_in_three_ways(tmp_path: Path) -> None:
    """Actor and critic by Megatron, tensor and pipeline parallel; the reference by torch, data-parallel."""
    pytest.importorskip("megatron.core")
    settings = overrides(
        tmp_path,
        "four",
        **THREE_STEPS,
        trainer__backend="megatron",
        trainer__tensor_parallel=2,
        trainer__pipeline_parallel=2,
        trainer__roles__ref__backend="torch",
        weights__mode="collective",
        trainer__roles__critic__data_parallel=2,
        trainer__roles__critic__tensor_parallel=2,
        algorithm__advantage="gae",
        algorithm__kl_coef=0.05,
        algorithm__ref_update_every=1,
        critic__lr=1e-3,
        rollout__sampling__temperature=0.8,  # gservers score at 1
    )
    run(COPY_SCRATCH, settings)
    assert_exactly_once(tmp_path / "four")
    made = steps(tmp_path / "four")
    assert largest_difference(tmp_path / "four") < 1e-3
    assert all(step["metrics"]["critic/loss"] > 0 for step in made)
    kept = tmp_path / "four" / "checkpoints" / "final"
    # the reference took over the policy's weights after the last step
    last, reference = (load_file(folder / "model.safetensors") for folder in (kept, kept / "ref"))
    assert all(torch.equal(last[name], weight) for name, weight in reference.items())


def reward_model(folder: Path, run_settings: list[str]) -> Path:
    """A scratch policy turned into a judge with a random head."""
    base = initial_checkpoint(configuration.load(COPY_SCRATCH, run_settings))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    save_weights(folder, model.named_parameters(), source=base, scalar_head=True)
    return folder


def test_a_reward_model_scores_and_a_users_function_gives_advantages(tmp_path: Path) -> None:
    settings = overrides(tmp_path, "judged", **THREE_STEPS, trainer__graph="tests.trainer.test_graph:users_graph")
    judge = reward_model(tmp_path / "judge", settings)
    run(COPY_SCRATCH, [*settings, f"reward_model.path={judge}"])
    assert_exactly_once(tmp_path / "judged")
    assert (tmp_path / "judged" / "checkpoints" / "step-000002" / "model.safetensors").is_file()  # the graph's hook
    made = steps(tmp_path / "judged")
    assert sum(name == "rew_inf" for step in made for name, _, _ in step["spans"]) >= 1  # ahead of its batch, at times
    for step in made:
        assert {"length_penalty", "actor_train"} <= {name for name, _, _ in step["spans"]}
        assert step["metrics"]["reward_std"] > 0  # no verifier ran: these are the model's
        assert step["metrics"]["reward_mean"] not in (0.0, 1.0)
        assert step["metrics"]["grad_norm"] > 0


ECS_SETTINGS = {
    **THREE_STEPS,
    "gserver__deterministic": "true",
    "staleness__max_staleness": 0,
    "trainer__save_at_end": "false",
}
"""With these a run can be repeated to the bit."""


def losses(run_dir: Path) -> list[list[str]]:
    """The losses of each step, to the bit, and its groups."""
    names = {"loss", "grad_norm", "kl", "critic/loss", "reward_mean"}
    found = [
        [f"{name} {value.hex()}" for name, value in sorted(step["metrics"].items()) if name in names]
        + [f"groups {step['seqs']}"]
        for step in steps(run_dir)
    ]
    assert len(found) == 3
    return found


def test_asynchronous_ecs_functions_have_the_losses_of_the_built_in_graph(tmp_path: Path) -> None:
    settings = ECS_SETTINGS | {"algorithm__kl_coef": 0.05}
    for graph in ("asynchronous", "examples.ecs_grpo:workflow"):
        run(COPY_SCRATCH, overrides(tmp_path, graph, **settings, trainer__graph=graph))
    found = losses(tmp_path / "examples.ecs_grpo:workflow")
    assert found == losses(tmp_path / "asynchronous")
    assert any(step[1] != "kl 0x0.0p+0" for step in found)  # the policy has left its reference


def test_synchronous_ecs_functions_have_the_losses_of_the_built_in_graph(tmp_path: Path) -> None:
    for graph in ("synchronous", "synchronous:examples.ecs_ppo:workflow"):
        run(PPO_SCRATCH, overrides(tmp_path, graph, **ECS_SETTINGS, trainer__graph=graph))
    found = losses(tmp_path / "synchronous:examples.ecs_ppo:workflow")
    assert found == losses(tmp_path / "synchronous")
    assert all(step[0].startswith("critic/loss 0x1.") for step in found)
