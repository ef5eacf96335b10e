"""What becomes of the trajectories that workflows make: the shared prompt, and those that are refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from streamrl.errors import WireError
from streamrl.rollout.generation import Generation
from streamrl.rollout.groups import check_trajectory, shared_prefix
from streamrl.rollout.workflows import TrajectoryBuilder
from streamrl.types import NO_VERSION, Trajectory


def built(prompt: list[int], sampled: list[int]) -> Trajectory:
    builder = TrajectoryBuilder()
    builder.append_prompt(prompt)
    builder.append_sampled(Generation(sampled, [0.0] * len(sampled), [0] * len(sampled), "stop", None, 0))
    return builder.build(reward=0.0, finish_reason="stop")


@pytest.mark.parametrize(
    ("siblings", "length"),
    [
        ([([1, 2, 3], [4]), ([1, 2, 3], [4])], 3),  # equal responses are not shared
        ([([1, 2, 3], [4]), ([1, 2, 9, 9], [4])], 2),
        ([([1, 2, 3], [4]), ([1, 2], [3, 4])], 2),
        ([([8, 1], [4]), ([9, 1], [4])], 0),
    ],
)
def test_shared_prefix(siblings: list[tuple[list[int], list[int]]], length: int) -> None:
    assert shared_prefix([built(*sibling) for sibling in siblings]) == length


def test_trajectories_that_a_trainer_could_not_use() -> None:
    good = built([1], [2])
    for change, message in [
        ({"reward": float("nan")}, "reward is nan"),
        ({"loss_mask": np.array([True, True])}, "first token is sampled"),
        ({"loss_mask": np.array([False])}, "shapes"),
        ({"policy_versions": np.array([NO_VERSION, NO_VERSION], dtype=np.int32)}, "NO_VERSION exactly"),
    ]:
        with pytest.raises(WireError, match=message):
            check_trajectory(msgspec.structs.replace(good, **change))
