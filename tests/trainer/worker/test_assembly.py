"""Weights given from one role to another, whose layouts and backends differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.config import from_dict
from streamrl.errors import ModelError
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.graph import graph_of
from streamrl.trainer.layout import Layout
from streamrl.trainer.worker.assembly import Assembly, give_weights
from tests.trainer.backends.reference import make_spec, save_models
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world
from tests.trainer.models import random_group, save_model


def _give(rank: int, models: Path) -> None:
    from streamrl.trainer.backends.megatron.model import MegatronModel

    def weights(model):
        return {name: weight.clone() for name, weight in model.gather_weights()}

    tensor_parallel = MegatronModel(
        make_spec(models / "llama"), layout=Layout(tensor=2), rank=rank, timeout_seconds=TIMEOUT_SECONDS
    )
    sharded = TorchModel(make_spec(models / "llama", shard=True), world=2)
    whole = TorchModel(make_spec(models / "llama", lr=None), world=2)
    generator = torch.Generator().manual_seed(3)
    shapes = dict(sharded.weight_specs())
    sharded.load_weights([(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()])
    first, other = weights(sharded), weights(whole)

    give_weights(sharded, tensor_parallel, share=1.0, world=2)
    found = weights(tensor_parallel)
    assert all(torch.equal(found[name], first[name]) for name in shapes)
    give_weights(tensor_parallel, whole, share=0.25, world=2)
    found = weights(whole)
    if rank == 0:
        for name in shapes:
            assert torch.allclose(found[name], 0.75 * other[name] + 0.25 * first[name], atol=1e-6), name
    # every rank has the same
    mine = torch.cat([parameter.detach().reshape(-1) for parameter in whole._parameters.values()])
    theirs = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(theirs, mine)
    assert torch.equal(theirs[0], theirs[1])
    for model in (tensor_parallel, sharded):
        _publish(rank, model, shapes)
    for model in (tensor_parallel, sharded, whole):
        model.close()


def _publish(rank, model, shapes):
    """Rank 0 breaks a pass off, makes a whole one, and ends; the other rank has to be through with both, and free."""
    from streamrl.trainer.worker.weight_source import WeightSource

    source = WeightSource(model, world=2, timeout_seconds=TIMEOUT_SECONDS, dtype=torch.float32)
    if rank:
        source.serve()
        return
    broken_off = source.weights()
    assert next(broken_off)[0] == next(iter(shapes))
    broken_off.close()
    assert {name: tuple(weight.shape) for name, weight in source.weights()} == shapes
    source.end()


def _give_a_share(rank: int, folder: Path) -> None:
    source = TorchModel(make_spec(folder), world=2)
    target = TorchModel(make_spec(folder, lr=None, shard=True), world=2)
    before = {name: weight.clone() for name, weight in target.gather_weights()}
    source.load_weights([(name, torch.ones(shape)) for name, shape in source.weight_specs()])
    give_weights(source, target, share=0.25, world=2)
    for name, weight in target.gather_weights():
        if rank == 0:
            assert torch.allclose(weight, 0.75 * before[name] + 0.25), name
    source.close()
    target.close()


def test_a_share_of_weights_is_given_to_a_model_that_is_spread(tmp_path: Path) -> None:
    run_world(2, _give_a_share, save_model(tmp_path / "model"))


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}], ids=["whole", "adapter"])
def test_a_teacher_is_a_reference_of_any_size(tmp_path: Path, lora: dict[str, object]) -> None:
    policy, teacher = save_model(tmp_path / "model"), save_model(tmp_path / "teacher", "qwen3", seed=7)
    settings = {
        "model": {"path": str(policy), **lora},
        "algorithm": {"advantage": "none", "kl_coef": 1.0, "kl_in": "reward"},
        "run": {"device": "cpu"},
        "trainer": {"dtype": "float32"},
    }
    config = from_dict({**settings, "reference": {"path": str(teacher)}})
    assembly = Assembly(config, roles=frozenset({"actor", "ref"}), model_dir=policy, rank=0, device=torch.device("cpu"))
    group = random_group(0, np.random.default_rng(0))
    found = assembly.roles["ref"].inference([group])[0]
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    first = torch.from_numpy(group.packed_input_ids[: group.seqlens[0]].astype(np.int64))
    wanted = model(first[None]).logits[0].log_softmax(-1)[:-1].gather(-1, first[1:, None])[:, 0].detach()
    sampled = group.packed_loss_mask[1 : group.seqlens[0]]
    np.testing.assert_allclose(found[1 : group.seqlens[0]][sampled], wanted.numpy()[sampled], atol=1e-5)


@pytest.mark.parametrize(
    ("role", "algorithm"), [("reference", {"kl_coef": 1.0}), ("critic", {"advantage": "gae"}), ("reward_model", {})]
)
def test_a_model_with_other_tokens_is_refused(tmp_path: Path, role: str, algorithm: dict[str, object]) -> None:
    policy, teacher = save_model(tmp_path / "model"), save_model(tmp_path / "teacher")
    tokenizer = teacher / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"t7": 7', '"seven": 7'))
    config = from_dict(
        {"model": {"path": str(policy)}, "algorithm": algorithm, role: {"path": str(teacher)}, "run": {"device": "cpu"}}
    )
    with pytest.raises(ModelError, match=rf"{role}\.path = .* other tokens than the policy's: 1 of 48"):
        Assembly(config, roles=graph_of(config).roles, model_dir=policy, rank=0, device=torch.device("cpu"))


def test_weights_are_given_and_published_across_layouts_and_backends(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    save_models(tmp_path)
    run_world(2, _give, tmp_path)
