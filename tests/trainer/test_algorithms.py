"""Advantages, losses and KL against loops written from the formulas."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import AlgorithmConfig
from streamrl.trainer.algorithms.advantages import STD_EPS, moments, whiten
from streamrl.trainer.algorithms.losses import KLCoefficient, behavior_kl, behavior_weight, kl_estimate
from streamrl.trainer.algorithms.registry import advantage_of, policy_loss, random_tokens

reward = st.floats(-3, 3, width=32)
rewards_of_group = st.lists(reward, min_size=2, max_size=16)
logprob = st.floats(-8, 0, width=32)
advantage = st.floats(-2, 2, width=32)
clip = st.floats(0.05, 0.5)


def advantages_of(rewards, kind):
    """Of responses that are an attempt each."""
    return advantage_of(AlgorithmConfig(advantage=kind))(np.array(rewards, np.float32), np.arange(len(rewards)))


def loss_of(kind, now, centre, credit, index=None, **settings):
    """The loss `kind` of tokens that are a response each, or as `index` assigns them."""
    index = torch.arange(len(now)) if index is None else index
    unused = random_tokens(np.ones(1, np.float32), np.random.default_rng(0))
    tokens = unused._replace(
        logprobs=now, proximal_logprobs=centre, advantages=credit, sequence=index, sequences=int(index[-1]) + 1
    )
    return policy_loss(AlgorithmConfig(loss=kind, **settings))(tokens)


@pytest.mark.parametrize("kind", ["grpo", "mean", "rloo", "reinforce++-baseline"])
def test_equal_rewards_teach_exactly_nothing(kind):
    assert advantages_of([0.1] * 7, kind).tolist() == [0.0] * 7


@given(st.lists(rewards_of_group, min_size=1, max_size=5))
def test_whitening_in_parts_equals_whitening_the_whole(groups):
    parts = [torch.tensor(group) for group in groups]
    batch = sum(moments(part) for part in parts)
    got = [value for part in parts for value in whiten(part, batch).tolist()]
    everything = [r for group in groups for r in group]
    mean, std = statistics.fmean(everything), statistics.stdev(everything)
    assert got == pytest.approx([(r - mean) / (std + STD_EPS) for r in everything], rel=1e-3, abs=2e-3)


def one_token(logprob, proximal, advantage, low, high, dual):
    """Loss, its derivative by `logprob`, and whether it was clipped, with plain floats."""
    ratio = math.exp(logprob - proximal)
    bounded = max(1 - low, min(1 + high, ratio))
    gain, slope = min(ratio * advantage, bounded * advantage), ratio * advantage
    clipped = bounded * advantage < ratio * advantage
    if dual is not None and advantage < 0 and gain < dual * advantage:
        gain, clipped = dual * advantage, True
    return -gain, (0.0 if clipped else -slope), clipped


@given(
    st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=20), clip, clip, st.none() | st.floats(1.6, 5)
)
def test_ppo_follows_the_formula(tokens, low, high, dual):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    columns[0].requires_grad_()
    got = loss_of("ppo", *columns, clip_low=low, clip_high=high, dual_clip=dual)
    got.loss.sum().backward()
    for i, (now, centre, credit) in enumerate(tokens):
        loss, slope, clipped = one_token(now, centre, credit, low, high, dual)
        ratio = math.exp(now - centre)
        if min(abs(ratio - edge) for edge in (1 + high, 1 - low, dual or 1 + high)) < 1e-9:
            continue  # on the edge of a clip either answer is right
        assert float(got.loss[i].detach()) == pytest.approx(loss, rel=1e-6, abs=1e-9)
        assert float(columns[0].grad[i]) == pytest.approx(slope, rel=1e-6, abs=1e-9)
        assert bool(got.clipped[i]) == clipped


@given(st.lists(st.tuples(st.floats(-40, 0), st.floats(-40, 0)), min_size=1, max_size=20))
def test_the_pull_is_towards_the_behavior_policy_and_bounded(tokens):
    now, behavior = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    now.requires_grad_()
    got = behavior_kl(now, behavior)
    got.sum().backward()
    for i, (mine, theirs) in enumerate(tokens):
        x = mine - theirs
        ratio = math.exp(x)
        wanted = ratio - 1 - x if ratio <= 2 else 1 - 2 * math.log(2) + x
        assert float(got[i].detach()) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        assert float(now.grad[i]) == pytest.approx(min(ratio, 2) - 1, rel=1e-9, abs=1e-12)


responses = st.lists(
    st.tuples(advantage, st.lists(st.tuples(logprob, logprob), min_size=1, max_size=6)), min_size=1, max_size=5
)


def flat(found):
    """Log-probabilities, proximal ones, advantages and response index of all tokens of `responses`."""
    rows = [(now, old, a, i) for i, (a, tokens) in enumerate(found) for now, old in tokens]
    now, old, a, index = zip(*rows, strict=True)
    vectors = [torch.tensor(column, dtype=torch.float64) for column in (now, old, a)]
    vectors[0].requires_grad_()
    return *vectors, torch.tensor(index)


@given(responses, clip, clip)
def test_gspo_clips_whole_responses(found, low, high):
    now, old, a, index = flat(found)
    got = loss_of("gspo", now, old, a, index, clip_low=low, clip_high=high)
    got.loss.sum().backward()
    start = 0
    for response_advantage, tokens in found:
        n = len(tokens)
        mean = sum(x - y for x, y in tokens) / n
        if min(abs(math.exp(mean) - 1 - high), abs(math.exp(mean) - 1 + low)) > 1e-9:
            loss, slope, clipped = one_token(mean, 0.0, response_advantage, low, high, None)
            assert got.loss[start : start + n].tolist() == pytest.approx([loss] * n, rel=1e-6, abs=1e-9)
            # each of the n terms depends on the mean, which changes by 1/n with each token
            assert now.grad[start : start + n].tolist() == pytest.approx([slope] * n, rel=1e-6, abs=1e-9)
            assert got.clipped[start : start + n].tolist() == [clipped] * n
        start += n


@given(st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=20), clip, clip)
def test_cispo_weighs_and_never_stops_a_gradient(tokens, low, high):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    columns[0].requires_grad_()
    got = loss_of("cispo", *columns, clip_low=low, clip_high=high)
    got.loss.sum().backward()
    for i, (now, old, a) in enumerate(tokens):
        weight = max(1 - low, min(1 + high, math.exp(now - old)))
        assert float(got.loss[i].detach()) == pytest.approx(-weight * a * now, rel=1e-6, abs=1e-9)
        assert float(columns[0].grad[i]) == pytest.approx(-weight * a, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("limit", ["truncate", "mask"])
@given(found=responses, cap=st.floats(0.5, 10), floor=st.floats(0, 0.5))
def test_behavior_weight_follows_the_formula(level, limit, found, cap, floor):
    proximal, behavior, _, index = flat(found)
    got = behavior_weight(
        proximal, behavior, index, len(found), level=level, limit=limit, cap=cap, floor=floor if limit == "mask" else 0
    )
    assert not got.weight.requires_grad
    i = 0
    for _, tokens in found:
        ratios = [math.exp(p - b) for p, b in tokens]
        whole = {"token": None, "sequence": math.prod(ratios), "geometric": math.prod(ratios) ** (1 / len(ratios))}
        for ratio in ratios:
            weight = ratio if whole[level] is None else whole[level]
            if min(abs(weight - cap), abs(weight - floor)) > 1e-9:
                within = weight <= cap and (limit == "truncate" or weight >= floor)
                expected = weight if within else (cap if limit == "truncate" else 0.0)
                assert float(got.weight[i]) == pytest.approx(expected, rel=1e-6)
                assert bool(got.limited[i]) == (not within)
            i += 1


def test_kl_estimators():
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())
    for kind in ("k1", "k3"):
        estimates = kl_estimate(policy, reference, kind=kind)
        assert float((policy.exp() * estimates).sum()) == pytest.approx(exact, abs=1e-12), kind
    assert bool((kl_estimate(policy, reference, kind="k3") >= 0).all())
    assert kl_estimate(policy, reference, kind="k2").tolist() == pytest.approx(
        [(p - r) ** 2 / 2 for p, r in zip(policy.tolist(), reference.tolist(), strict=True)]
    )


def test_kl_coefficient_follows_its_target():
    fixed = KLCoefficient(0.1, target=None, horizon=10)
    fixed.begin_step(0)
    fixed.update(5.0)
    fixed.begin_step(1)
    assert fixed.value == 0.1
    assert not fixed.adapts
    steered = KLCoefficient(0.1, target=0.02, horizon=10)
    expected = 0.1
    for step, (kl, change) in enumerate([(0.021, 0.05), (1.0, 0.2), (0.0, -0.2)]):
        for _ in range(2):  # each role begins the step; one of them ends it before the other begins
            steered.begin_step(step)
            steered.update(kl)
            assert steered.value == pytest.approx(expected)
        expected *= 1 + change / 10
        assert steered.next_value == pytest.approx(expected)
    steered.resume(0.3)
    steered.begin_step(9)
    assert steered.value == 0.3
