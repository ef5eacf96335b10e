"""Rewards of single calls, from what an agent says to the advantage of each token, against loops over the formulas."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import AlgorithmConfig
from streamrl.rollout.agents.tree import EpisodeTree, PolicyCall, discounted
from streamrl.rollout.groups import check_trajectory, shared_prefix
from streamrl.trainer.roles.advantages import assign_credit
from streamrl.trainer.roles.items import TrainItem
from streamrl.transport import codec
from streamrl.types import Generation, SampleMeta, TrajectoryGroup


def made(parents: list[int], first: int) -> EpisodeTree:
    """An episode whose calls continue `parents` (an index, or -1: nothing) and sample two tokens each, all others."""
    tree = EpisodeTree()
    for number, parent in enumerate(parents):
        before = tree.calls[parent] if parent >= 0 else None
        prompt = (5,) if before is None else (*before.token_ids, 6)
        ids = [first + 2 * number, first + 2 * number + 1]
        call = PolicyCall(before, prompt, Generation(ids, [-0.5, -0.25], [0, 1], "stop", None, 0))
        tree.add(call, messages=None, reply=None, tools=[])  # type: ignore[arg-type]
    return tree


def through_the_wire(group: TrajectoryGroup) -> TrajectoryGroup:
    head, *frames = codec.encode(group, max_group_bytes=10**9)
    header = msgspec.msgpack.decode(head, type=codec.GroupHeader)
    return codec.decode(header, frames, limits=codec.Limits(max_group_bytes=10**9), sender="rollout/0")


Rewards = list[list[float]]
"""Of each episode, of each of its calls."""


def returns_of(rewards: list[float], discount: float) -> list[float]:
    """G_k = Σ_{j ≥ k} discount^(j - k) · r_j."""
    n = len(rewards)
    return [sum(discount ** (j - k) * rewards[j] for j in range(k, n)) for k in range(n)]


def advantages_of(rewards: Rewards, discount: float, kind: str) -> Rewards:
    returns = [returns_of(of_one, discount) for of_one in rewards]
    if len({value for of_one in returns for value in of_one}) == 1:
        return [[0.0] * len(of_one) for of_one in returns]
    own = [statistics.fmean(of_one) for of_one in returns]
    mean = statistics.fmean(own)
    distance = [statistics.fmean((value - mean) ** 2 for value in of_one) for of_one in returns]
    deviation = (sum(distance) / (len(returns) - 1)) ** 0.5
    found = []
    for episode, of_one in enumerate(returns):
        others = statistics.fmean(own[:episode] + own[episode + 1 :])
        for_kind = {
            "grpo": [(value - mean) / (deviation + 1e-4) for value in of_one],
            "mean": [value - mean for value in of_one],
            "rloo": [value - others for value in of_one],
        }
        found.append(for_kind[kind])
    return found


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[list[int]], Rewards]:
    """Of two to four episodes, which call each call continues, and what each call earns."""
    parents, rewards = [], []
    for _ in range(draw(st.integers(2, 4))):
        calls = draw(st.integers(1, 5))
        parents.append([draw(st.integers(-1, number - 1)) for number in range(calls)])
        earned = st.sampled_from([0.0, 0.0, 1.0, -0.5, 0.25])
        rewards.append(draw(st.lists(earned, min_size=calls, max_size=calls)))
    return parents, rewards


@settings(deadline=None, max_examples=150)
@given(episodes(), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.sampled_from(["grpo", "mean", "rloo"]))
def test_each_token_gets_what_followed_its_call_compared_with_the_group(
    drawn: tuple[list[list[int]], Rewards], discount: float, kind: Any
) -> None:
    parents, rewards = drawn
    trees = [made(of_one, 100 * (number + 1)) for number, of_one in enumerate(parents)]
    trajectories, of = [], []
    for number, (tree, earned) in enumerate(zip(trees, rewards, strict=True)):
        found = tree.trajectories(discounted(earned, discount=discount), score=sum(earned))
        for trajectory in found:
            check_trajectory(trajectory)
        trajectories += found
        of += [number] * len(found)
    group = through_the_wire(
        TrajectoryGroup.from_trajectories(
            seq=0, worker="rollout/0", prompt_length=shared_prefix(trajectories), trajectories=trajectories, episodes=of
        )
    )
    assert SampleMeta.of(group, head=0).episode_rewards == pytest.approx([sum(earned) for earned in rewards])
    assert group.mean_reward == pytest.approx(statistics.fmean(sum(earned) for earned in rewards))
    blank = np.zeros(group.tokens, np.int32)
    item = TrainItem(group, trainable=group.packed_loss_mask, age=blank, comparable=group.packed_loss_mask)
    algorithm = AlgorithmConfig(advantage=kind)
    (credit,) = assign_credit([item], algorithm, kl_coef=0.0, given=False, add_up=lambda vector: vector)
    sampled = group.packed_loss_mask
    found_by_token = list(
        zip(group.packed_input_ids[sampled].tolist(), credit.advantages.numpy()[sampled].tolist(), strict=True)
    )
    expected = {
        100 * (episode + 1) + 2 * number + place: advantage
        for episode, of_one in enumerate(advantages_of(rewards, discount, kind))
        for number, advantage in enumerate(of_one)
        for place in (0, 1)
    }
    assert sorted(token for token, _ in found_by_token) == sorted(expected)  # each once
    for token, advantage in found_by_token:
        assert advantage == pytest.approx(expected[token], rel=1e-3, abs=1e-4), token
