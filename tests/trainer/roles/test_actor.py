"""The policy on the torch backend against transformers and loops over single sequences, in float32."""

from __future__ import annotations

import math
from itertools import product

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from streamrl.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from streamrl.trainer.algorithms.losses import KLCoefficient
from streamrl.trainer.backends.base import ModelSpec, Ranks
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.calls import Sibling
from streamrl.trainer.layout import Layout
from streamrl.trainer.roles.actor import Actor, sample
from streamrl.trainer.roles.items import Minibatch, StepStatistics, TrainItem
from streamrl.transport.collective import join_world, open_store
from tests.forked import Forked
from tests.trainer.models import random_group, save_model

ALONE = Layout()
LONGEST = 9
# a large eps keeps AdamW from turning rounding noise of tiny gradients into whole steps
TRAINER = TrainerConfig(lr=1e-2, max_tokens_per_microbatch=120, optimizer=OptimizerConfig(grad_clip=1e9, eps=1e-3))


class Policy:
    """An actor with its reference, as a model worker has them."""

    def __init__(self, folder, *, algorithm=None, temperature=1.0, layout=ALONE, rank=0, shard=False):
        self.steps = 0
        algorithm = algorithm or AlgorithmConfig()
        cpu = torch.device("cpu")
        common = {"head": "tokens", "device": cpu, "dtype": torch.float32, "temperature": temperature}
        trained = ModelSpec(
            folder=folder, lr=TRAINER.lr, optimizer=TRAINER.optimizer, total_updates=10, shard=shard, **common
        )
        kl = KLCoefficient(algorithm.kl_coef, target=algorithm.kl_target, horizon=algorithm.kl_horizon)

        def actor(spec):
            return Actor(
                TorchModel(spec, world=layout.world, context=layout.context),
                ranks=Ranks(layout, rank, device=cpu),
                trainer=TRAINER,
                algorithm=algorithm,
                kl=kl,
                longest=LONGEST,
                device=cpu,
                temperature=temperature,
            )

        self.actor = actor(trained)
        self.model = self.actor.model
        self.reference = actor(ModelSpec(folder=folder, **common)) if algorithm.kl_coef else None

    def logprobs(self, groups, *, reference):
        return (self.reference if reference else self.actor).inference(groups)

    def train(self, items, *, loss_tokens, episodes, compared=None):
        """A step on a batch that is one minibatch."""
        credits = self.actor.begin_step(items, policy_version=self.steps, given=False)
        minibatch = Minibatch(loss_tokens, episodes, compared)
        found = StepStatistics()
        self.actor.train_step(items, credits, minibatch, found, before_update=lambda: None)
        self.actor.end_step(found.sums)
        self.steps += 1
        return found


def make_groups(count=5, *, seed=0):
    rng = np.random.default_rng(seed)
    return [random_group(i, rng, prompt=3 + 2 * i, gaps=i % 2 == 1, versions=(0, 6)) for i in range(count)]


def make_item(group, *, oldest=0, ref=None):
    young = group.packed_loss_mask & (group.packed_policy_versions >= oldest)
    return TrainItem(
        group=group,
        trainable=young,
        age=6 - group.packed_policy_versions,
        comparable=young,
        ref_logprobs=ref,
    )


def reference_logprobs(model, group):
    """Packed log-probabilities of one group, sequence by sequence."""
    parts = []
    for end, length in zip(np.cumsum(group.seqlens), group.seqlens, strict=True):
        ids = torch.from_numpy(group.packed_input_ids[end - length : end].astype(np.int64))
        own = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(1), own]))
    return torch.cat(parts)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("learns", [True, False], ids=["learns", "without contrast"])
def test_a_step_tells_what_it_found_of_one_response_before_the_update(tmp_path, temperature, learns):
    folder = save_model(tmp_path / "model")
    policy = Policy(folder, temperature=temperature)
    groups = make_groups()
    if not learns:
        groups[3].rewards[:] = 1.0  # such a group is left out of the step otherwise
    first, end = groups[3].bounds(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        want = reference_logprobs(model, groups[3])[first:end][groups[3].packed_loss_mask[first:end]]
    items = [make_item(group) for group in groups]
    found = policy.train(items, loss_tokens=60, episodes=20, compared=Sibling(3, 2))
    assert found.compared == pytest.approx(want.tolist(), abs=1e-5)
    elsewhere = policy.train(items, loss_tokens=60, episodes=20, compared=Sibling(9, 2))
    assert elsewhere.compared == []
    again = policy.train(items, loss_tokens=60, episodes=20, compared=Sibling(3, 2))
    assert again.compared != pytest.approx(want.tolist(), abs=1e-3)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sum", "constant"])
def test_an_episode_with_branches_weighs_as_much_as_one_without(tmp_path, aggregation):
    """The loss of a loop over tokens, with advantages that compare the means of attempts."""
    policy = Policy(
        save_model(tmp_path / "model"),
        algorithm=AlgorithmConfig(loss_aggregation=aggregation, advantage="mean", behavior_kl_coef=0.0),
    )
    groups = [
        msgspec.structs.replace(group, episodes=np.array(episodes, np.int32))
        for group, episodes in zip(make_groups(3), ([0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 1, 2]), strict=True)
    ]
    items = [make_item(group, oldest=2) for group in groups]
    tokens, attempts = sum(int(item.trainable.sum()) for item in items), 4 + 2 + 3
    wanted = 0.0
    for item, logprobs in zip(items, policy.logprobs(groups, reference=False), strict=True):
        group = item.group
        own = [np.mean(group.rewards[group.episodes == episode]) for episode in range(group.episodes[-1] + 1)]
        advantage = np.repeat(group.rewards - np.mean(own), group.seqlens)
        episode_of = np.repeat(group.episodes, group.seqlens)
        for t in np.flatnonzero(item.trainable):
            weight = min(math.exp(logprobs[t] - group.packed_behavior_logprobs[t]), 5.0)
            divisor = {
                "token": tokens,
                "sequence": item.trainable[episode_of == episode_of[t]].sum() * attempts,
                "sum": attempts,
                "constant": LONGEST * attempts,
            }[aggregation]
            wanted -= weight * advantage[t] / divisor
    found = policy.train(items, loss_tokens=tokens, episodes=attempts)
    assert found.sums["loss"] == pytest.approx(wanted, abs=1e-5)


SPREAD = {
    "grpo": AlgorithmConfig(),
    # what has to be added up over ranks: the moments for whitening, and the KL that steers its coefficient
    "whitened, KL steered": AlgorithmConfig(
        advantage="reinforce++-baseline", kl_coef=0.2, kl_estimator="k2", kl_target=0.01, kl_horizon=1
    ),
}


LAYOUTS = [(Layout(data=2), False), (Layout(data=2), True), (Layout(context=2), False)]
"""Of two ranks, and whether weights are sharded."""


def _train_spread(policy, kind, chosen):
    """Two steps on the groups `chosen` of five."""
    for step in range(2):
        groups = make_groups(5, seed=step)
        tokens = sum(int(g.packed_loss_mask.sum()) for g in groups)
        mine = groups[chosen]
        refs = policy.logprobs(mine, reference=True) if SPREAD[kind].kl_coef else [None] * len(mine)
        items = [make_item(g, ref=r) for g, r in zip(mine, refs, strict=True)]
        found = policy.train(items, loss_tokens=tokens, episodes=20)
    return found.maxima.get("kl_coef")


def _rank(folder, rank, port, answers):
    torch.set_num_threads(1)
    join_world(address="127.0.0.1", port=port, rank=rank, world_size=2, backend="gloo", timeout=60)
    for kind, (layout, shard) in product(SPREAD, LAYOUTS):
        policy = Policy(folder, algorithm=SPREAD[kind], layout=layout, rank=rank, shard=shard)
        shares = (slice(0, 4), slice(4, 5)) if layout.data == 2 else (slice(0, 5), slice(0, 5))
        coefficient = _train_spread(policy, kind, shares[rank])
        whole = policy.model.gather_weights() if shard else policy.model._parameters.items()
        weights = {name: weight.detach().numpy() for name, weight in whole}
        answers.send(((kind, layout, shard, rank), (weights, coefficient)))
        policy.model.close()
    dist.destroy_process_group()


def test_two_ranks_with_unequal_groups_or_with_rows_in_common_equal_one(tmp_path):
    folder = save_model(tmp_path / "model")
    store = open_store("127.0.0.1")
    with Forked(_rank, [(folder, rank, store.port) for rank in range(2)]) as ranks:
        found = dict(ranks.take(2 * len(SPREAD) * len(LAYOUTS)))
        ranks.end()
    for kind in SPREAD:
        alone = Policy(folder, algorithm=SPREAD[kind])
        coefficient = _train_spread(alone, kind, slice(0, 5))
        for layout, shard in LAYOUTS:
            (weights, first), (others, second) = (found[kind, layout, shard, rank] for rank in range(2))
            for name, weight in alone.model.gather_weights():
                assert shard or np.array_equal(weights[name], others[name]), name
                assert np.abs(weights[name] - weight.numpy()).max() < 1e-4, (kind, layout, shard, name)
            assert first == second
            assert first == (coefficient if coefficient is None else pytest.approx(coefficient, rel=1e-5))
            if coefficient is not None:
                assert coefficient != SPREAD[kind].kl_coef


@pytest.mark.parametrize(("groups", "computed"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_sample_of_the_groups_without_contrast_stands_for_all_of_them(tmp_path, groups, computed):
    """The loss of the pull keeps its size on average: over all choices of the sample its mean is that of all groups."""
    policy = Policy(save_model(tmp_path / "model"), algorithm=AlgorithmConfig(behavior_kl_coef=0.1)).actor
    items = [make_item(group) for group in make_groups(groups)]
    for item in items:
        item.group.rewards[:] = 0.1
        item.age[:] = 2
    credits = policy.begin_step(items, policy_version=2, given=False)
    found = policy._teaching(items, credits, None)
    assert len(found) == computed
    assert [factor for _, _, factor in found] == [groups / computed] * computed


def test_every_group_is_in_a_sample_equally_often():
    counts = np.zeros(8, dtype=int)
    for batch in range(2000):
        seqs = [batch * 8 + place for place in range(8)]
        for seq in sample(seqs, 0.25):
            counts[seq % 8] += 1
    assert counts.sum() == 2000 * 2
    assert abs(counts / 2000 - 0.25).max() < 0.05


def test_a_group_of_weight_four_counts_as_four(tmp_path, monkeypatch):
    """With a sample of one group, gradient and figures are those of four copies of this group."""
    algorithm = AlgorithmConfig(behavior_kl_coef=0.1)
    folder = save_model(tmp_path / "model")
    group = make_groups(1)[0]
    group.rewards[:] = 0.1
    items = [make_item(msgspec.structs.replace(group, seq=seq)) for seq in range(4)]
    for item in items:
        item.age[:] = 2
    tokens = 4 * int(group.packed_loss_mask.sum())
    found = {}
    for share in (0.25, 1.0):
        monkeypatch.setattr("streamrl.trainer.roles.actor.PULL_SHARE", share)
        policy = Policy(folder, algorithm=algorithm)
        found[share] = policy.train(items, loss_tokens=tokens, episodes=16)
    sampled, every = found[0.25], found[1.0]
    assert every.maxima["grad_norm"] > 0
    assert sampled.maxima["grad_norm"] == pytest.approx(every.maxima["grad_norm"], rel=1e-5)
    for name in ("loss", "tokens", "behavior_kl", "sequences", "sequence_weight"):
        assert sampled.sums[name] == pytest.approx(every.sums[name], rel=1e-5), name
    assert sampled.sums["computed_tokens"] == every.sums["computed_tokens"]  # equal copies are computed once
