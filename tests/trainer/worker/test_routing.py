"""Routing replay in a model worker: what the metrics say with it and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamrl.gserver.server.engine import Output
from streamrl.trainer.calls import MinibatchShare, TrainStep
from streamrl.types import NO_EXPERT, Trajectory, TrajectoryGroup
from tests.gserver.tiny import engine_for, generate, job, make_model, prompt, save
from tests.trainer.worker.test_computation import Worker

LAYERS, TOP_K = 3, 2
"""Of qwen3-moe."""


def nearly_tied(seed: int) -> Any:
    """A model whose experts are chosen, two of three, by differences in the last bits of the router's weights, which
    `seed` draws."""
    model = make_model("qwen3-moe")
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            weight = layer.mlp.gate.weight
            tied = weight[::3].detach().repeat_interleave(3, 0)
            with torch.no_grad():
                weight.copy_(tied + 1e-6 * torch.randn(weight.shape, generator=generator))
    return model


async def sampled(folder: Path) -> list[tuple[list[int], Output]]:
    """Prompts and responses; of some prompts the engine has a part in its cache."""
    shared = prompt(30)
    prompts = [shared, shared, prompt(4), [*shared, *prompt(9, seed=1)]]
    found = []
    async with engine_for(folder, max_running=4) as engine:
        for ids in ([prompts[0], prompts[1], prompts[2]], [prompts[3]]):
            jobs = [job(f"{len(found)}.{i}", p, return_routed_experts=True) for i, p in enumerate(ids)]
            found += zip(ids, await generate(engine, jobs), strict=True)
    assert found[-1][1].cached_tokens >= 30
    return found


def trajectory(ids: list[int], output: Output) -> Trajectory:
    tokens = [*ids, *output.output_ids]
    mask = np.arange(len(tokens)) >= len(ids)
    assert output.routed_experts is not None
    assert output.routed_experts.shape == (len(tokens) - 1, LAYERS, TOP_K)
    unknown = np.full((1, LAYERS * TOP_K), NO_EXPERT, np.uint8)
    return Trajectory(
        input_ids=np.array(tokens, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.concatenate([np.zeros(len(ids)), output.logprobs]).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        reward=0.0,
        finish_reason="length",
        routed_experts=np.concatenate([output.routed_experts.reshape(len(tokens) - 1, -1), unknown]),
    )


async def test_replaying_takes_the_jumps_out_of_the_difference(tmp_path: Path) -> None:
    """The trainer's routers are those of the engine but for the last bits; this is seen before the first update."""
    responses = await sampled(save(nearly_tied(0), tmp_path / "engine"))
    group = TrajectoryGroup.from_trajectories(
        seq=0, worker="", prompt_length=0, trajectories=[trajectory(*response) for response in responses]
    )
    group.rewards = np.arange(group.size, dtype=np.float32)
    save(nearly_tied(1), tmp_path / "model")
    share = MinibatchShare([0], int(group.packed_loss_mask.sum()), group.size)
    differences: dict[bool, float] = {}
    for replays in (True, False):
        worker = Worker(tmp_path, groups=[group], replay_routing=replays)
        trained = worker.computation.carry_out(TrainStep("actor_train", 0, 0, [share]))
        assert trained.sums["comparable_tokens"] == share.loss_tokens
        assert trained.maxima["expert_load"] > 1
        differences[replays] = trained.sums["sampling_diff"] / trained.sums["comparable_tokens"]
        assert (trained.maxima["sampling_diff"] < 1e-4) == replays
    assert differences[True] < 1e-5
    assert differences[False] > 1e-3
