"""`TorchTrainer`: training steps without a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import streamrl
from streamrl import config as configuration
from streamrl.errors import ConfigError, DataError
from streamrl.types import Trajectory, TrajectoryGroup

PROMPT = [1, 2, 3]


def settings(**changes: object) -> streamrl.Config:
    tree = {
        "model": {
            "path": "scratch",
            "scratch": {"alphabet": "0123456789", "hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1},
        },
        "trainer": {"lr": 1e-2, "dtype": "float32", "batch_groups": 1},
        "run": {"device": "cpu"},
    }
    for key, value in changes.items():
        configuration.assign(tree, key.replace("__", "."), value)
    return configuration.from_dict(tree, where="test")


def group(*, seq: int = 0, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> TrajectoryGroup:
    """One-token responses; the reward of each is the one in `rewards`, its token the place of it."""
    mask = np.array([False, False, False, True])
    return TrajectoryGroup.from_trajectories(
        seq=seq,
        worker="test",
        prompt_length=len(PROMPT),
        trajectories=[
            Trajectory(
                input_ids=np.array([*PROMPT, 4 + token], np.int32),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, np.float32(-2.4), np.float32(0)),
                policy_versions=np.where(mask, np.int32(version), np.int32(-1)),
                reward=reward,
                finish_reason="stop",
            )
            for token, reward in enumerate(rewards)
        ],
    )


def test_steps_raise_the_probability_of_what_was_rewarded() -> None:
    trainer = streamrl.TorchTrainer(settings())
    (before,) = trainer.logprobs([group()])
    figures = [trainer.train_step([group(version=step)]) for step in range(5)]
    (after,) = trainer.logprobs([group()])
    assert trainer.policy_version == 5
    assert after[7] > before[7] + 0.1
    assert after[3] < before[3]
    assert [step["tokens_trained"] for step in figures] == [2] * 5
    assert figures[0]["grad_norm"] > 0


def test_a_saved_model_computes_what_the_trainer_does(tmp_path: Path) -> None:
    trainer = streamrl.TorchTrainer(settings())
    trainer.train_step([group()])
    saved = trainer.save(tmp_path / "model")
    (found,) = trainer.logprobs([group()])
    model = AutoModelForCausalLM.from_pretrained(saved)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)[[4, 5]].numpy()
    np.testing.assert_allclose(found[[3, 7]], expected, atol=1e-4)
    assert {name: tuple(weight.shape) for name, weight in trainer.weights().items()}.keys() <= dict(
        model.state_dict()
    ).keys()
    again = streamrl.TorchTrainer(settings(), folder=saved)
    np.testing.assert_array_equal(again.logprobs([group()])[0], found)


def test_reference_and_critic_are_part_of_a_step() -> None:
    trainer = streamrl.TorchTrainer(settings(algorithm__advantage="gae", algorithm__kl_coef=0.1))
    first = trainer.train_step([group(seq=0), group(seq=1)])
    second = trainer.train_step([group(seq=0, version=1)])
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl"] != first["kl"]
    assert {"critic/loss", "critic/explained_variance"} <= second.keys()


def test_old_tokens_do_not_enter_the_loss() -> None:
    trainer = streamrl.TorchTrainer(settings(staleness__max_staleness=1))
    for _ in range(2):
        trainer.train_step([group()])
    figures = trainer.train_step([group(seq=0, version=0), group(seq=1, version=1)])
    assert (figures["tokens_masked"], figures["tokens_trained"]) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"trainer__data_parallel": 2, "trainer__batch_groups": 2}, "workers"),
        ({"trainer__backend": "megatron"}, "trainer.backend"),
        ({"reward_model__path": "somewhere"}, "reward_model.path"),
    ],
)
def test_settings_that_need_a_run_are_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        streamrl.TorchTrainer(settings(**changes))


def test_a_batch_needs_groups_with_different_numbers() -> None:
    trainer = streamrl.TorchTrainer(settings())
    for groups in ([], [group(), group()]):
        with pytest.raises(DataError, match="seq"):
            trainer.train_step(groups)
    trainer.train_step([group()])  # a refused batch leaves nothing behind
