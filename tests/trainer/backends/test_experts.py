"""Mixture of experts on the torch backend: the engine's choice of experts, replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.packing import MicroBatch, pack
from streamrl.types import Trajectory, TrajectoryGroup
from tests.experts import as_in_files
from tests.gserver.tiny import make_model, prompt, save
from tests.trainer.backends.reference import make_spec
from tests.trainer.models import random_group

SHAPE = "qwen3-moe"
LAYERS, TOP_K, DENSE = 3, 2, 1


def micros_of(groups: Sequence[TrajectoryGroup], *, share_prefix: bool = True) -> list[MicroBatch]:
    return pack(groups, max_tokens=90, share_prefix=share_prefix)


def test_gradients_flow_through_the_shares_of_replayed_experts(tmp_path: Path) -> None:
    """Compared with transformers, whose routers are made to choose the same."""
    model = make_model(SHAPE)
    folder = save(model, tmp_path)
    ids = prompt(25)
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(6)[:TOP_K] for _ in range(len(ids) * LAYERS)]).reshape(len(ids), -1)
    mask = np.arange(len(ids)) >= 5
    group = TrajectoryGroup.from_trajectories(
        seq=0,
        worker="",
        prompt_length=5,
        trajectories=[
            Trajectory(
                input_ids=np.array(ids, np.int32),
                loss_mask=mask,
                behavior_logprobs=np.zeros(len(ids), np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                reward=0.0,
                finish_reason="stop",
                routed_experts=experts.astype(np.uint8),
            )
        ],
    )
    for number, layer in enumerate(model.model.layers):
        if number != DENSE:
            chosen = torch.from_numpy(experts[:, number * TOP_K : (number + 1) * TOP_K])
            layer.mlp.gate.forward = _choosing(layer.mlp.gate, chosen)
    logprobs = model(torch.tensor([ids])).logits[0, 4:-1].log_softmax(-1)
    logprobs.gather(-1, torch.tensor(ids[5:])[:, None]).sum().backward()
    wanted = as_in_files({name: parameter.grad for name, parameter in model.named_parameters()})

    for gradient_checkpointing in (False, True):
        spec = make_spec(folder, temperature=1.0, replay_routing=True, gradient_checkpointing=gradient_checkpointing)
        ours = TorchModel(spec)
        ours.accumulate(micros_of([group]), lambda _, output: output.values.sum())
        found = {name: parameter.grad for name, parameter in ours._parameters.items()}
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert torch.allclose(found[name], gradient, atol=1e-5 * float(gradient.abs().max()) + 1e-7), name
        assert float(found["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-4


def _choosing(gate: Any, chosen: Tensor) -> Any:
    """transformers' router, with its choice made."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
        shares = logits.softmax(-1).gather(-1, chosen)
        return logits, shares / shares.sum(-1, keepdim=True), chosen

    return forward


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_balancing_loss_is_that_of_transformers_in_each_layer(tmp_path: Path, gradient_checkpointing: bool) -> None:
    """Of trajectories of several lengths, in several micro-batches."""
    model = make_model(SHAPE)
    rng = np.random.default_rng(0)
    groups = [random_group(i, rng, siblings=1, prompt=20 + i, longest=3) for i in range(4)]
    for group in groups:
        group.packed_input_ids %= 39
    coefficient = 0.5
    spec = make_spec(
        save(model, tmp_path), router_aux_loss_coef=coefficient, gradient_checkpointing=gradient_checkpointing
    )
    ours = TorchModel(spec)
    micros = micros_of(groups, share_prefix=False)
    assert len(micros) > 1
    assert any(len(set(micro.group_index.tolist())) > 1 for micro in micros)
    ours.accumulate(micros, lambda _, output: output.values.sum() * 0.0)

    loss = torch.zeros(())
    load = torch.zeros(2, 6)
    tokens = sum(micro.tokens for micro in micros)
    for micro in micros:
        ids = [torch.from_numpy(groups[g].packed_input_ids.astype(np.int64)) for g in set(micro.group_index.tolist())]
        routers = [model(each[None], output_router_logits=True).router_logits for each in ids]
        for place, layer in enumerate(zip(*routers, strict=True)):
            scores = torch.cat(list(layer))
            share = micro.tokens / tokens / 2
            loss = loss + share * load_balancing_loss_func((scores,), num_experts=6, top_k=TOP_K)
            load[place] += scores.topk(TOP_K).indices.flatten().bincount(minlength=6)
    (coefficient * loss).backward()
    wanted = as_in_files({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert float(wanted["model.layers.2.mlp.gate.weight"].abs().max()) > 1e-4
    for name, gradient in wanted.items():
        found = ours._parameters[name].grad
        assert found is not None
        assert torch.allclose(found, gradient, atol=1e-5 * float(gradient.abs().max()) + 1e-8), name
    assert ours.update(lambda: None).expert_load == pytest.approx(float((load.amax(1) / load.mean(1)).mean()))
