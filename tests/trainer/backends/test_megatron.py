"""The Megatron backend over gloo: every layout of up to four ranks computes what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.backends.common import Checks, save_models
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world

pytest.importorskip("megatron.core")

LAYOUTS = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)],
    4: [(1, 2, 2), (2, 2, 1), (2, 1, 2)],
}
"""Data, tensor, pipeline, by world size."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def _check_layouts(rank: int, models: Path, scratch: Path, sizes: list[tuple[int, int, int]]) -> None:
    import torch.distributed as dist

    from streamrl.trainer.backends.megatron.model import MegatronModel
    from streamrl.trainer.layout import Layout

    def make(spec, layout):
        return MegatronModel(spec, layout=layout, rank=rank, timeout_seconds=TIMEOUT_SECONDS)

    layouts = [Layout(*size) for size in sizes]
    for number, layout in enumerate(layouts):
        checks = Checks(make, models=models, scratch=scratch, layout=layout, rank=rank, barrier=dist.barrier)
        for shard in (False, True):
            checks.all(shard=shard)
        other = layouts[(number + 1) % len(layouts)]
        checks.state_moves_to(other, shard=bool(number % 2), other_shard=not number % 2)


@pytest.mark.parametrize("world", LAYOUTS)
def test_layouts_equal_transformers(tmp_path: Path, models: Path, world: int) -> None:
    run_world(world, _check_layouts, models, tmp_path, LAYOUTS[world])
