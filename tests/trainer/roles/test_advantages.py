"""Credit of groups that lost siblings: that of a loop over the remaining ones."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import numpy as np
import pytest

from streamrl.config import AlgorithmConfig
from streamrl.errors import RewardError
from streamrl.trainer.algorithms.advantages import STD_EPS
from streamrl.trainer.roles.advantages import assign_credit
from streamrl.trainer.roles.items import TrainItem
from tests.rollout.making import Scripted, configured, maker_of, received, route_to

LOST = {0: {1, 4}, 1: set(), 2: {0, 5, 6, 7}}
"""Group → siblings that fail, of eight; sibling s of the others earns s, and s + 10 on its second branch."""


async def shrunk_groups(branches: int) -> list[TrainItem]:
    config = configured(on_failed_sibling="shrink", min_siblings=3)
    workflow = Scripted(
        lambda seq, sibling, attempt: RewardError("lost") if sibling in LOST[seq] else None, branches=branches
    )
    maker = maker_of(workflow, config)
    groups = [received(await maker.make(seq, route_to()), config) for seq in LOST]
    return [
        TrainItem(
            group=group,
            trainable=group.packed_loss_mask,
            age=np.zeros(group.tokens, np.int32),
            comparable=group.packed_loss_mask,
        )
        for group in groups
    ]


def plain_loop(kind: str, branches: int) -> list[list[float]]:
    """The advantage of each trajectory of each group, by the formulas, where every response has as many tokens."""
    found: list[list[float]] = []
    for lost in LOST.values():
        siblings = [
            [sibling + 10.0 * branch for branch in range(branches)] for sibling in range(8) if sibling not in lost
        ]
        means = [fmean(rewards) for rewards in siblings]
        advantages = []
        for number, rewards in enumerate(siblings):
            for reward in rewards:
                others = [mean for other, mean in enumerate(means) if other != number]
                if kind == "rloo":
                    advantages.append(reward - sum(others) / len(others))
                elif kind == "reinforce++":
                    advantages.append(reward)
                else:
                    advantages.append(reward - sum(means) / len(means))
        if kind == "grpo":
            squares = [fmean([(reward - fmean(means)) ** 2 for reward in rewards]) for rewards in siblings]
            deviation = math.sqrt(sum(squares) / (len(siblings) - 1))
            advantages = [advantage / (deviation + STD_EPS) for advantage in advantages]
        found.append(advantages)
    if kind in ("reinforce++", "reinforce++-baseline"):  # whitened over the tokens of the batch: two of each
        tokens = [advantage for advantages in found for advantage in advantages for _ in range(2)]
        mean, deviation = fmean(tokens), stdev(tokens)
        found = [[(advantage - mean) / (deviation + STD_EPS) for advantage in advantages] for advantages in found]
    return found


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("kind", ["grpo", "mean", "rloo", "reinforce++-baseline", "reinforce++"])
async def test_advantages_of_shrunk_groups_are_those_of_a_loop_over_the_remaining_siblings(
    kind: str, branches: int
) -> None:
    items = await shrunk_groups(branches)
    assert [int(item.group.episodes[-1]) + 1 for item in items] == [6, 8, 4]
    algorithm = AlgorithmConfig(advantage=kind)
    credits = assign_credit(items, algorithm, kl_coef=0.0, given=False, add_up=lambda moments: moments)
    for item, credit, wanted in zip(items, credits, plain_loop(kind, branches), strict=True):
        sampled = credit.advantages.numpy()[item.group.packed_loss_mask].reshape(-1, 2)
        np.testing.assert_allclose(sampled, np.repeat(wanted, 2).reshape(-1, 2), rtol=1e-5, atol=1e-6)
        assert not credit.advantages.numpy()[~item.group.packed_loss_mask].any()
