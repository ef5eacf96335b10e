"""A training step reads nothing from the device until all its micro-batches have computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.config import AlgorithmConfig, CriticConfig, TrainerConfig
from streamrl.trainer.algorithms.losses import KLCoefficient
from streamrl.trainer.backends.base import Ranks
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.calls import Sibling
from streamrl.trainer.layout import Layout
from streamrl.trainer.roles.actor import Actor
from streamrl.trainer.roles.critic import Critic
from streamrl.trainer.roles.items import Minibatch, StepStatistics, TrainItem
from tests.devices import DEVICE, ON_DEVICE
from tests.trainer.backends.reference import make_groups, make_spec
from tests.trainer.models import save_model
from tests.trainer.waiting import waits

ALGORITHMS = {
    "default": AlgorithmConfig(),
    "sequences": AlgorithmConfig(loss="gspo", behavior_weight_level="geometric", loss_aggregation="sequence"),
    "all terms": AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01, behavior_weight_limit="mask", dual_clip=3.0),
}


def make_role(folder: Path, kind: str, algorithm: AlgorithmConfig, *, max_tokens: int, device: torch.device) -> Any:
    options: dict[str, Any] = {
        "ranks": Ranks(Layout(), 0, device=device),
        "trainer": TrainerConfig(max_tokens_per_microbatch=max_tokens),
        "algorithm": algorithm,
        "kl": KLCoefficient(algorithm.kl_coef, target=None, horizon=1),
        "device": device,
    }
    if kind == "actor":
        spec = make_spec(folder, temperature=1.0, device=device, entropy_gradient=algorithm.entropy_coef > 0)
        return Actor(TorchModel(spec), longest=9, **options)
    spec = make_spec(folder, head="scalar", temperature=1.0, device=device)
    return Critic(TorchModel(spec), critic=CriticConfig(), **options)


def make_items(seed: int) -> list[TrainItem]:
    """Of several ages; with all that a term may need."""
    items = []
    for group in make_groups(seed, count=6):
        mask = group.packed_loss_mask
        age = np.where(mask, group.seq % 3, 0).astype(np.int32)
        arrays = (np.where(mask, group.packed_behavior_logprobs + shift, 0).astype(np.float32) for shift in (0.1, 0.2))
        item = TrainItem(group, mask, age, mask & (age == 0), ref_logprobs=next(arrays), values=next(arrays))
        items.append(item)
    return items


def step(role: Any, seed: int, compared: Sibling | None) -> StepStatistics:
    items = make_items(seed)
    credits = role.begin_step(items, policy_version=seed, given=False)
    tokens = sum(int(item.trainable.sum()) for item in items)
    found = StepStatistics()
    kept = frozenset({items[1].group.seq})
    minibatch = Minibatch(tokens, sum(item.group.size for item in items), compared=compared, kept=kept)
    role.train_step(items, credits, minibatch, found, before_update=lambda: None)
    return found


def watched(role: Any, device: torch.device) -> list[str]:
    """What makes the host wait while micro-batches compute."""
    found: list[str] = []
    accumulate: Callable[..., None] = role.model.accumulate

    def watching(*args: Any) -> None:
        with waits(device) as here:
            accumulate(*args)
        found.extend(here)

    role.model.accumulate = watching
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_policys_micro_batches_never_wait(tmp_path: Path, algorithm: str) -> None:
    folder = save_model(tmp_path, "qwen3")
    counts = []
    for max_tokens in (60, 4096):
        role = make_role(folder, "actor", ALGORITHMS[algorithm], max_tokens=max_tokens, device=torch.device("cpu"))
        inside = watched(role, torch.device("cpu"))
        with waits(torch.device("cpu")) as found:
            statistics = step(role, 0, Sibling(3, 0))
        assert inside == []
        assert statistics.sums["tokens"] > 0
        assert statistics.compared
        assert statistics.outputs.keys() == {1}
        counts.append(found.count("tolist"))
    assert counts[0] == counts[1], "reads grow with the number of micro-batches"


def test_a_critics_micro_batches_never_wait(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3")
    role = make_role(folder, "critic", AlgorithmConfig(advantage="gae"), max_tokens=60, device=torch.device("cpu"))
    inside = watched(role, torch.device("cpu"))
    assert step(role, 0, None).sums["critic/tokens"] > 0
    assert inside == []


def test_waiting_is_noticed() -> None:
    tensor = torch.tensor([1.0, 0.0])
    reads: list[Callable[[], Any]] = [lambda: tensor.max().item(), lambda: tensor.tolist(), lambda: tensor.cpu()]
    for wait in (*reads, lambda: tensor[tensor > 0], lambda: bool(tensor[0]), lambda: tensor.bool().nonzero()):
        with waits(torch.device("cpu")) as found:
            wait()
        assert found


class TestOnDevice:
    pytestmark = ON_DEVICE

    @pytest.mark.parametrize("kind", ["actor", "critic"])
    @pytest.mark.parametrize("max_tokens", [60, 4096], ids=["short", "long"])
    def test_micro_batches_never_wait(self, tmp_path: Path, kind: str, max_tokens: int) -> None:
        """Once all is compiled: the same batch comes again."""
        algorithm = AlgorithmConfig(advantage="gae" if kind == "critic" else "grpo")
        role = make_role(save_model(tmp_path, "qwen3"), kind, algorithm, max_tokens=max_tokens, device=DEVICE)
        for _ in range(2):
            step(role, 0, None)
        inside = watched(role, DEVICE)
        step(role, 0, None)
        assert inside == []
