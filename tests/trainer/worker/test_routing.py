"""Routing replay in a model worker: what the metrics say with it and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from streamrl.trainer.calls import MinibatchShare, TrainStep
from streamrl.types import TrajectoryGroup
from tests.gserver.tiny import save
from tests.trainer.backends.test_experts import nearly_tied, sampled, trajectory
from tests.trainer.worker.test_computation import Worker


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
