"""Credit of a batch: which tokens the moments of whitened advantages are taken over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streamrl.config import AlgorithmConfig
from streamrl.trainer.roles.advantages import assign_credit
from streamrl.trainer.roles.items import TrainItem
from tests.trainer.models import random_group

PER_TOKEN = ("reinforce++", "reinforce++-baseline", "gae", "none")
ALGORITHMS = {
    kind: AlgorithmConfig(advantage=kind, kl_coef=0.1, kl_in="reward", kl_estimator="k1") for kind in PER_TOKEN
}


def items_of(seed: int, *, oldest_version: int) -> list[TrainItem]:
    """Three groups of versions 0 to 3, in which tokens from before `oldest_version` are over age."""
    rng = np.random.default_rng(seed)
    groups = [random_group(seq, rng, gaps=True, versions=(0, 4)) for seq in range(3)]
    return [
        TrainItem(
            group=group,
            trainable=group.packed_loss_mask & (group.packed_policy_versions >= oldest_version),
            age=3 - group.packed_policy_versions,
            comparable=np.zeros(group.tokens, bool),
            ref_logprobs=rng.normal(-1, 1, group.tokens).astype(np.float32),
            values=rng.normal(0, 1, group.tokens).astype(np.float32),
        )
        for group in groups
    ]


def advantages_of(items: list[TrainItem], kind: str, *, ranks: int) -> list[torch.Tensor]:
    """The advantages of `items`, dealt out to `ranks` in turn."""
    shares = [items[rank::ranks] for rank in range(ranks)]
    sums: list[torch.Tensor] = []

    def note(vector: torch.Tensor) -> torch.Tensor:
        sums.append(vector)
        return vector

    for share in shares:
        assign_credit(share, ALGORITHMS[kind], kl_coef=0.1, given=False, add_up=note)
    total = torch.stack(sums).sum(0)
    found = [
        assign_credit(share, ALGORITHMS[kind], kl_coef=0.1, given=False, add_up=lambda _: total) for share in shares
    ]
    return [found[number % ranks][number // ranks].advantages for number in range(len(items))]


@pytest.mark.parametrize("oldest_version", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", PER_TOKEN)
def test_tokens_in_the_loss_are_whitened_by_their_own_moments(kind: str, oldest_version: int) -> None:
    items = items_of(oldest_version, oldest_version=oldest_version)
    alone, spread = (advantages_of(items, kind, ranks=ranks) for ranks in (1, 4))  # the fourth rank has no group
    for one, other in zip(alone, spread, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    trained = torch.cat([found[item.trainable] for item, found in zip(items, alone, strict=True)])
    assert float(trained.mean()) == pytest.approx(0, abs=1e-4)
    assert float(trained.std()) == pytest.approx(1, abs=0.02)
    for item, found in zip(items, alone, strict=True):
        assert not found[~item.group.packed_loss_mask].any()


@pytest.mark.parametrize("kind", PER_TOKEN)
def test_a_batch_without_a_token_in_the_loss_has_finite_advantages(kind: str) -> None:
    found = advantages_of(items_of(0, oldest_version=9), kind, ranks=2)
    assert all(bool(advantages.isfinite().all()) for advantages in found)
