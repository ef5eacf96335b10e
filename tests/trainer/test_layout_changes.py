"""A checkpoint of one worker goes on with two, sharded or not, and back."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from streamrl.config import AlgorithmConfig, OptimizerConfig
from streamrl.safetensors_files import TensorFiles
from streamrl.trainer.layout import Layout
from streamrl.transport.collective import join_world, open_store
from tests.forked import Forked
from tests.trainer.models import save_model
from tests.trainer.roles.test_actor import TRAINER, Policy, make_groups, make_item

SETTINGS = {
    "trainer": msgspec.structs.replace(TRAINER, optimizer=OptimizerConfig(schedule="cosine", warmup_steps=3, eps=1e-3)),
    "algorithm": AlgorithmConfig(kl_coef=0.2, kl_estimator="k2", kl_target=0.01, kl_horizon=1),
}
STEMS = ("model", "state/optimizer")
FACTS = ("state/updates.json", "state/kl.json")
SHARDED = (False, True)


def step(policy, number, chosen=slice(None)):
    """One optimizer step; `chosen` are this rank's groups."""
    groups = make_groups(5, seed=number)
    tokens = sum(int(g.packed_loss_mask.sum()) for g in groups)
    mine = groups[chosen]
    refs = policy.logprobs(mine, reference=True)
    items = [make_item(g, ref=r) for g, r in zip(mine, refs, strict=True)]
    return policy.train(items, loss_tokens=tokens, episodes=20, before_update=lambda: None)


def resumed(saved, first, **options):
    policy = Policy(saved, reference_dir=first, **SETTINGS, **options)
    policy.load_state(saved)
    return policy


def files_of(stem):
    return TensorFiles(stem.parent, stem.name)


def rank_of_two(rank, port, tmp_path, answers):
    """Go on from `one`: save again at once, and after a step."""
    torch.set_num_threads(1)
    join_world(address="127.0.0.1", port=port, rank=rank, world_size=2, backend="gloo", timeout=60)
    for shard in SHARDED:
        policy = resumed(tmp_path / "one", tmp_path / "first", layout=Layout(data=2), rank=rank, shard=shard)
        policy.save(tmp_path / f"again-{shard}")
        step(policy, 2, slice(0, 4) if rank == 0 else slice(4, 5))
        policy.save(tmp_path / f"two-{shard}")
        policy.model.close()
    dist.destroy_process_group()


def test_one_worker_then_two_then_one(tmp_path):
    first = save_model(tmp_path / "first")
    whole = Policy(first, **SETTINGS)
    for number in range(2):
        step(whole, number)
    whole.save(tmp_path / "one")
    store = open_store("127.0.0.1")
    with Forked(rank_of_two, [(rank, store.port, tmp_path) for rank in range(2)]) as ranks:
        for number in (2, 3):
            expected = step(whole, number)
        ranks.end()
    for shard in SHARDED:
        for stem in STEMS:  # loading and saving under another layout changes no bit
            before, after = files_of(tmp_path / "one" / stem), files_of(tmp_path / f"again-{shard}" / stem)
            assert after.are_wholes != shard
            assert set(before.names()) == set(after.names())
            assert all(torch.equal(before.read(name), after.read(name)) for name in before.names()), (shard, stem)
        for file in FACTS:
            assert (tmp_path / "one" / file).read_bytes() == (tmp_path / f"again-{shard}" / file).read_bytes()
        policy = resumed(tmp_path / f"two-{shard}", first)
        assert policy.model.updates == 3
        found = step(policy, 3)
        assert found.maxima["lr"] == expected.maxima["lr"]
        assert np.isclose(found.maxima["kl_coef"], expected.maxima["kl_coef"], rtol=1e-5)
        for (name, got), (_, want) in zip(policy.named_weights(), whole.named_weights(), strict=True):
            assert (got - want).abs().max() < 1e-4, (shard, name)
