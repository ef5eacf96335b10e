"""Advantages and losses against loops written from the formulas."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.trainer.algorithms.advantages import STD_EPS, group_advantages
from streamrl.trainer.algorithms.losses import decoupled_ppo, effective_sample_size, kl_k3

reward = st.floats(-3, 3, width=32)
logprob = st.floats(-8, 0, width=32)


@given(st.lists(reward, min_size=2, max_size=16))
def test_grpo_advantages_follow_the_formula(rewards):
    got = group_advantages(torch.tensor(rewards), kind="grpo").tolist()
    if len(set(rewards)) == 1:
        assert got == [0.0] * len(rewards)
        return
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    assert got == pytest.approx([(r - mean) / (std + STD_EPS) for r in rewards], abs=2e-3)


@given(st.lists(reward, min_size=2, max_size=16))
def test_mean_advantages_sum_to_zero(rewards):
    got = group_advantages(torch.tensor(rewards), kind="mean")
    assert float(got.sum()) == pytest.approx(0, abs=1e-4)
    mean = statistics.fmean(rewards)
    assert got.tolist() == pytest.approx([r - mean for r in rewards], abs=1e-5)


def test_equal_rewards_teach_exactly_nothing():
    assert group_advantages(torch.full((7,), 0.1), kind="grpo").tolist() == [0.0] * 7


def one_token(logprob, proximal, behavior, advantage, low, high, cap):
    """Loss, its derivative by `logprob`, and whether it was clipped, with plain floats."""
    weight = min(math.exp(proximal - behavior), cap)
    ratio = math.exp(logprob - proximal)
    bounded = max(1 - low, min(1 + high, ratio))
    loss = -weight * min(ratio * advantage, bounded * advantage)
    clipped = bounded * advantage < ratio * advantage
    return loss, (0.0 if clipped else -weight * ratio * advantage), clipped


@given(
    st.lists(st.tuples(logprob, logprob, logprob, st.floats(-2, 2, width=32)), min_size=1, max_size=20),
    st.floats(0.05, 0.5),
    st.floats(0.05, 0.5),
    st.floats(0.5, 10),
)
def test_decoupled_ppo_follows_the_formula(tokens, low, high, cap):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    columns[0].requires_grad_()
    got = decoupled_ppo(*columns, clip_low=low, clip_high=high, behavior_weight_cap=cap)
    got.loss.sum().backward()
    for i, values in enumerate(tokens):
        loss, slope, clipped = one_token(*values, low, high, cap)
        ratio = math.exp(values[0] - values[1])
        if min(abs(ratio - 1 - high), abs(ratio - 1 + low)) < 1e-9:
            continue  # on the edge of the clip either answer is right
        assert float(got.loss[i].detach()) == pytest.approx(loss, rel=1e-6, abs=1e-9)
        assert float(columns[0].grad[i]) == pytest.approx(slope, rel=1e-6, abs=1e-9)
        assert bool(got.clipped[i]) == clipped
        assert float(got.behavior_weight[i]) <= cap * (1 + 1e-12)


@given(st.lists(logprob, min_size=1, max_size=8))
def test_with_proximal_equal_to_behavior_it_is_ppo(values):
    behavior = torch.tensor(values)
    got = decoupled_ppo(
        behavior, behavior, behavior, torch.ones(len(values)), clip_low=0.2, clip_high=0.2, behavior_weight_cap=5
    )
    assert got.loss.tolist() == [-1.0] * len(values)
    assert got.behavior_weight.tolist() == [1.0] * len(values)


def test_kl_k3_is_unbiased_and_never_negative():
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())
    estimates = kl_k3(policy, reference)
    assert float((policy.exp() * estimates).sum()) == pytest.approx(exact, abs=1e-12)
    assert bool((estimates >= 0).all())


def test_effective_sample_size():
    assert float(effective_sample_size(torch.ones(10))) == pytest.approx(1.0)
    assert float(effective_sample_size(torch.tensor([1.0, 0, 0, 0]))) == pytest.approx(0.25)
