"""Mixture of experts on the Megatron backend over gloo: experts spread over ranks, and routing that is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamrl.trainer.backends.base import ParallelModel
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.layout import Layout
from streamrl.types import NO_EXPERT, TrajectoryGroup
from tests.trainer.backends.common import Checks
from tests.trainer.backends.reference import EXPERTS, SMALL, make_groups, make_spec, micro_batches
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world

pytest.importorskip("megatron.core")

ONE_STAGE_WITHOUT = "one stage without experts"
NOT_NORMALISED = "not normalised"
LAYERS, TOP_K, COUNT = 3, 2, 4
"""Of the model `EXPERTS`."""


@pytest.fixture(scope="module")
def models(models: Path) -> Path:
    """Those of all tests, and two more."""
    common = {"head_dim": 16, "num_experts": COUNT, "moe_intermediate_size": 24}
    for kind, settings in {
        ONE_STAGE_WITHOUT: {"num_experts_per_tok": 2, "mlp_only_layers": [1], "norm_topk_prob": True},
        NOT_NORMALISED: {"num_experts_per_tok": 3, "norm_topk_prob": False},
    }.items():
        torch.manual_seed(7)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **common, **settings)).save_pretrained(models / kind)
    return models


def _make(rank: int) -> Any:
    from streamrl.trainer.backends.megatron.model import MegatronModel

    return lambda spec, layout: MegatronModel(spec, layout=layout, rank=rank, timeout_seconds=TIMEOUT_SECONDS)


def _checks(rank: int, models: Path, scratch: Path, layout: Layout) -> Checks:
    import torch.distributed as dist

    return Checks(_make(rank), models=models, scratch=scratch, layout=layout, rank=rank, barrier=dist.barrier)


def _check_two(rank: int, models: Path, scratch: Path) -> None:
    spread, shared_rows = Layout(data=2, expert=2), Layout(context=2, expert=2)
    for layout, shard in ((spread, False), (spread, True), (shared_rows, True), (Layout(tensor=2, expert=2), False)):
        _checks(rank, models, scratch, layout).model_equals_reference(EXPERTS, shard=shard)
    _checks(rank, models, scratch, Layout(tensor=2)).model_equals_reference(NOT_NORMALISED, shard=True)
    _checks(rank, models, scratch, spread).state_moves_to(Layout(tensor=2), shard=True, other_shard=False, kind=EXPERTS)


def test_two_ranks_share_experts_and_compute_what_transformers_does(tmp_path: Path, models: Path) -> None:
    run_world(2, _check_two, models, tmp_path)


def _check_stages(rank: int, models: Path, scratch: Path) -> None:
    layout = Layout(data=2, pipeline=2, expert=2)
    _checks(rank, models, scratch, layout).model_equals_reference(ONE_STAGE_WITHOUT, shard=False)


def test_a_stage_may_have_no_experts(tmp_path: Path, models: Path) -> None:
    run_world(4, _check_stages, models, tmp_path)


def _with_routes(groups: Sequence[TrajectoryGroup]) -> Sequence[TrajectoryGroup]:
    """`groups`, whose tokens were computed by experts drawn at random; of every fifth nothing is known."""
    rng = np.random.default_rng(1)
    for group in groups:
        drawn = rng.permuted(np.tile(np.arange(COUNT), (group.tokens, LAYERS, 1)), axis=-1)[..., :TOP_K]
        drawn[rng.random(group.tokens) < 0.2] = NO_EXPERT
        group.packed_routed_experts = drawn.astype(np.uint8).flatten()
    return groups


def _check_against_torch(rank: int, models: Path) -> None:
    """Replayed routing, the load-balancing loss and the load, with layers computed again; one rank has most to do."""
    groups = _with_routes(make_groups(count=4))
    own = groups[:3] if rank == 0 else groups[3:]
    for replays in (True, False):
        spec = make_spec(
            models / EXPERTS, replay_routing=replays, router_aux_loss_coef=0.5, gradient_checkpointing=replays
        )
        both: list[ParallelModel] = [TorchModel(spec, world=2), _make(rank)(spec, Layout(data=2, expert=2))]
        outputs, updates, moments = [], [], []
        for model in both:
            micros = micro_batches(own, share_prefix=not replays)
            found = model.infer(micros)
            assert found is not None
            outputs.append(torch.cat([output.values for output in found]))
            model.accumulate(micros, lambda _, output: (output.values * output.entropy).sum())
            updates.append(model.update(lambda: None))
            moments.append(_summed(model))
            model.close()
        assert torch.allclose(*outputs, atol=1e-5)
        assert updates[1].grad_norm == pytest.approx(updates[0].grad_norm, rel=1e-5)
        assert updates[1].expert_load == pytest.approx(updates[0].expert_load)
        assert updates[1].expert_load > 1
        assert moments[1].keys() == moments[0].keys()
        for name, wanted in moments[0].items():
            assert torch.allclose(moments[1][name], wanted, atol=1e-6 * float(wanted.abs().max()) + 1e-8), name
        if replays:
            replayed = outputs[0]
    assert float((replayed - outputs[0]).abs().max()) > 0.01
    _check_replay_of_shared_rows(rank, models)


def _check_replay_of_shared_rows(rank: int, models: Path) -> None:
    """Ranks that compute different tokens of the same rows each have the experts of their own."""
    groups = _with_routes(make_groups(count=3))
    micros = micro_batches(groups)
    spec = make_spec(models / EXPERTS, replay_routing=True, lr=None)
    wanted = TorchModel(spec).infer(micros)
    for layout in (Layout(tensor=2, expert=2), Layout(context=2)):
        model = _make(rank)(spec, layout)
        for found, known in zip(model.infer(micros), wanted, strict=True):
            assert torch.allclose(found.values, known.values, atol=1e-5), layout
        model.close()


def test_routing_is_replayed_as_on_the_torch_backend(models: Path) -> None:
    run_world(2, _check_against_torch, models)


def _summed(model: ParallelModel) -> dict[str, torch.Tensor]:
    """The first moments of all ranks, whole: after one step they are the gradients."""
    import torch.distributed as dist

    found = {f"exp_avg/{name}": torch.zeros(shape) for name, shape in model.weight_specs()}
    for part in model.optimizer_parts():
        if part.name in found:
            box = tuple(slice(at, at + size) for at, size in zip(part.start, part.values.shape, strict=True))
            found[part.name][box] += part.values
    for tensor in found.values():
        dist.all_reduce(tensor)
    return found
