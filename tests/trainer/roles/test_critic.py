"""PPO with a critic: values, and steps of critic and actor, against loops over single tokens in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from streamrl.config import AlgorithmConfig, CriticConfig, OptimizerConfig, TrainerConfig
from streamrl.trainer.algorithms.advantages import generalised_advantages
from streamrl.trainer.algorithms.losses import KLCoefficient
from streamrl.trainer.backends.base import ModelSpec, Ranks
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.layout import Layout
from streamrl.trainer.roles.actor import Actor
from streamrl.trainer.roles.critic import Critic, RewardModel
from streamrl.trainer.roles.items import Minibatch, StepStatistics
from tests.trainer.models import random_group, save_model, save_weights
from tests.trainer.roles.test_actor import make_groups, make_item, reference_logprobs

CPU = torch.device("cpu")
OPTIMIZER = OptimizerConfig(grad_clip=1e9, eps=1e-3)
TRAINER = TrainerConfig(lr=1e-2, max_tokens_per_microbatch=120, optimizer=OPTIMIZER)
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


def save_critic(folder, *, seed=3):
    """A checkpoint with a scalar head that is not 0."""
    torch.manual_seed(seed)
    base = save_model(folder.with_name(folder.name + "-base"), "qwen3", seed=seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.1)
    save_weights(folder, model.named_parameters(), source=base, scalar_head=True)
    return folder


def loop_values(model, group):
    """Packed values of the states before each token, sequence by sequence."""
    parts = []
    for end, length in zip(np.cumsum(group.seqlens), group.seqlens, strict=True):
        ids = torch.from_numpy(group.packed_input_ids[end - length : end].astype(np.int64))
        values = model.score(model.model(ids[None]).last_hidden_state)[0, :, 0]
        parts.append(torch.cat([torch.zeros(1), values[:-1]]))
    return torch.cat(parts)


def roles(folder, critic_dir, algorithm, critic_config):
    ranks = Ranks(Layout(), 0, device=CPU)
    kl = KLCoefficient(algorithm.kl_coef, target=None, horizon=1)
    common = {"device": CPU, "dtype": torch.float32, "lr": 1e-2, "optimizer": OPTIMIZER}
    actor = Actor(
        TorchModel(ModelSpec(folder=folder, head="tokens", **common)),
        ranks=ranks,
        trainer=TRAINER,
        algorithm=algorithm,
        kl=kl,
        longest=9,
        device=CPU,
    )
    critic = Critic(
        TorchModel(ModelSpec(folder=critic_dir, head="scalar", **common)),
        ranks=ranks,
        trainer=TRAINER,
        critic=critic_config,
        algorithm=algorithm,
        kl=kl,
        device=CPU,
    )
    return actor, critic


@pytest.mark.parametrize("value_clip", [None, 0.05])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_ppo_steps_of_critic_and_actor_equal_a_loop(tmp_path, value_clip, kl_coef):
    algorithm = AlgorithmConfig(
        behavior_kl_coef=0.0,
        advantage="gae",
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        kl_coef=kl_coef,
        kl_in="reward",
        kl_estimator="k1",
    )
    folder, critic_dir = save_model(tmp_path / "model", "qwen3"), save_critic(tmp_path / "critic")
    actor, critic = roles(folder, critic_dir, algorithm, CriticConfig(value_clip=value_clip))
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    judge = AutoModelForSequenceClassification.from_pretrained(critic_dir, num_labels=1, dtype=torch.float32)
    options = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.0}
    optimizers = [torch.optim.AdamW(model.parameters(), **options) for model in (policy, judge)]
    for step in range(3):
        groups = make_groups(3, seed=step)
        values = critic.inference(groups)
        with torch.no_grad():
            wanted = [loop_values(judge, group) for group in groups]
            refs = [reference_logprobs(reference, group) for group in groups]
        for group, got, want in zip(groups, values, wanted, strict=True):
            assert np.abs(got - want.numpy())[group.packed_loss_mask].max() < 1e-5
        if step == 1:  # a value at which the clip matters
            values = [
                v + 0.1 * np.float32(m) for v, m in zip(values, [g.packed_loss_mask for g in groups], strict=True)
            ]
        items = [make_item(g, oldest=2, ref=r.numpy() if kl_coef else None) for g, r in zip(groups, refs, strict=True)]
        for item, value in zip(items, values, strict=True):
            item.values = value.astype(np.float32)
        tokens = sum(int(item.trainable.sum()) for item in items)
        minibatch = Minibatch(loss_tokens=tokens, episodes=12)
        critic_figures, actor_figures = (train(role, items, minibatch, step) for role in (critic, actor))
        losses = loop_ppo(policy, judge, items, refs, tokens, kl_coef, value_clip)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert min(actor_figures.update_seconds, critic_figures.update_seconds) > 0
        assert actor_figures.sums["loss"] == pytest.approx(float(losses[0].detach()), abs=1e-5)
        assert critic_figures.sums["critic/loss"] == pytest.approx(float(losses[1].detach()), abs=1e-5)
        for model, role in ((policy, actor), (judge, critic)):
            for (name, want), (got_name, got) in zip(
                model.named_parameters(), role.model.gather_weights(), strict=True
            ):
                assert name == got_name
                assert float((want.detach() - got).abs().max()) < 1e-5, (step, name)


def train(role, items, minibatch, step):
    """A step on a batch that is one minibatch."""
    credits = role.begin_step(items, policy_version=step, given=False)
    found = StepStatistics()
    role.train_step(items, credits, minibatch, found, before_update=lambda: None)
    return found


def loop_ppo(policy, judge, items, refs, tokens, kl_coef, value_clip):
    """Losses of actor and critic, one token at a time."""
    found = []
    for item, ref in zip(items, refs, strict=True):
        group = item.group
        now, new_values = reference_logprobs(policy, group), loop_values(judge, group)
        for i, end in enumerate(np.cumsum(group.seqlens)):
            sampled = [t for t in range(end - group.seqlens[i], end) if group.packed_loss_mask[t]]
            rewards = [-kl_coef * float(group.packed_behavior_logprobs[t] - ref[t]) for t in sampled]
            rewards[-1] += float(group.rewards[i])
            old = [float(item.values[t]) for t in sampled]
            for t, advantage, value in zip(sampled, loop_gae(rewards, old), old, strict=True):
                found.append((item, t, advantage, advantage + value, value, now[t], new_values[t]))
    advantages = np.array([advantage for item, t, advantage, *_ in found if item.trainable[t]])
    mean, deviation = advantages.mean(), advantages.std(ddof=1)
    actor_loss, critic_loss = torch.zeros(()), torch.zeros(())
    for item, t, advantage, wanted, old, now, value in found:
        if not item.trainable[t]:
            continue
        weight = min(float((now.detach() - item.group.packed_behavior_logprobs[t]).exp()), 5.0)
        ratio = (now - now.detach()).exp()
        actor_loss = actor_loss - weight * ratio * (advantage - mean) / (deviation + 1e-4) / tokens
        error = (value - wanted) ** 2
        if value_clip is not None:
            error = torch.max(error, (value.clamp(old - value_clip, old + value_clip) - wanted) ** 2)
        critic_loss = critic_loss + error / 2 / tokens
    return actor_loss, critic_loss


def test_a_checkpoint_without_a_scalar_head_starts_at_zero_and_is_saved_with_one(tmp_path):
    folder = save_model(tmp_path / "model", "llama_tied")
    _, critic = roles(folder, folder, AlgorithmConfig(advantage="gae"), CriticConfig())
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
