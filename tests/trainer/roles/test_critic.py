"""Critics and reward models; the steps of PPO are in test_recipes.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from streamrl.config import AlgorithmConfig, CriticConfig, TrainerConfig
from streamrl.trainer.algorithms.advantages import generalised_advantages
from streamrl.trainer.algorithms.losses import KLCoefficient
from streamrl.trainer.backends.base import ModelSpec, Ranks
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.layout import Layout
from streamrl.trainer.roles.critic import Critic, RewardModel
from tests.trainer.models import random_group, save_model, save_weights
from tests.trainer.roles.test_actor import make_groups

CPU = torch.device("cpu")
GAMMA, LAMBDA = 0.9, 0.8


def loop_gae(rewards, values):
    """Advantages of one response, each as the sum that defines it."""
    n = len(rewards)
    deltas = [rewards[t] + GAMMA * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((GAMMA * LAMBDA) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=7), max_size=6))
def test_gae_is_the_sum_that_defines_it(responses):
    flat = torch.tensor([pair for response in responses for pair in response], dtype=torch.float64).reshape(-1, 2)
    lengths = torch.tensor([len(response) for response in responses], dtype=torch.int64)
    got = generalised_advantages(flat[:, 0], flat[:, 1], lengths, gamma=GAMMA, gae_lambda=LAMBDA)
    want = [a for response in responses for a in loop_gae(*map(list, zip(*response, strict=True)))]
    assert got.tolist() == pytest.approx(want, abs=1e-9)


def save_critic(folder):
    """A checkpoint with a scalar head that is not 0."""
    torch.manual_seed(3)
    base = save_model(folder.with_name(folder.name + "-base"), "qwen3", seed=3)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    save_weights(folder, model.named_parameters(), source=base, scalar_head=True)
    return folder


def test_a_checkpoint_without_a_scalar_head_starts_at_zero_and_is_saved_with_one(tmp_path):
    folder = save_model(tmp_path / "model", "llama_tied")
    algorithm = AlgorithmConfig(advantage="gae")
    critic = Critic(
        TorchModel(ModelSpec(folder=folder, head="scalar", device=CPU, dtype=torch.float32)),
        ranks=Ranks(Layout(), 0, device=CPU),
        trainer=TrainerConfig(max_tokens_per_microbatch=120),
        critic=CriticConfig(),
        algorithm=algorithm,
        kl=KLCoefficient(algorithm.kl_coef, target=None, horizon=1),
        device=CPU,
    )
    assert not any(values.any() for values in critic.inference(make_groups(2)))
    save_weights(tmp_path / "saved", critic.model.gather_weights(), source=folder, scalar_head=True)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert loaded.score.weight.shape == (1, 32)
    assert type(loaded).__name__ == "LlamaForSequenceClassification"


@pytest.mark.parametrize("share_prefix", [True, False])
def test_a_reward_model_scores_each_response_at_its_last_token(tmp_path, share_prefix):
    folder = save_critic(tmp_path / "judge")
    spec = ModelSpec(folder=folder, head="scalar", device=CPU, dtype=torch.float32)
    trainer = TrainerConfig(max_tokens_per_microbatch=100, share_prefix=share_prefix)
    judge = RewardModel(TorchModel(spec), trainer=trainer)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    rng = np.random.default_rng(0)
    groups = [random_group(i, rng, prompt=3 + i, gaps=True) for i in range(4)]
    for group, scores in zip(groups, judge.inference(groups), strict=True):
        assert scores.shape == (group.size,)
        for i, end in enumerate(np.cumsum(group.seqlens)):
            ids = torch.from_numpy(group.packed_input_ids[end - group.seqlens[i] : end].astype(np.int64))
            with torch.no_grad():
                want = float(model.score(model.model(ids[None]).last_hidden_state[:, -1]))
            assert scores[i] == pytest.approx(want, abs=1e-5)
