"""The torch backend over gloo: one, two and four ranks, whole and sharded, compute what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.trainer.layout import Layout
from tests.trainer.backends.common import Checks
from tests.trainer.backends.reference import EXPERTS, KINDS, SCALAR, save_models
from tests.trainer.backends.world import run_world

WORLDS = {1: [*KINDS, SCALAR, EXPERTS], 2: [*KINDS, EXPERTS, SCALAR], 4: ["llama_tied", EXPERTS]}
"""The models that each is checked with, by world size."""
HEAD_CHUNK = 16
"""Small, so that several chunks make up the head's work."""


def _check(rank: int, models: Path, scratch: Path, world: int) -> None:
    import torch.distributed as dist

    from streamrl.trainer.backends import distribution
    from streamrl.trainer.backends.torch import TorchModel

    def make(spec, layout):
        return TorchModel(spec, world=layout.data)

    distribution.HEAD_CHUNK_STATES = HEAD_CHUNK
    layout = Layout(data=world)
    for sharded in (0, 1) if world > 1 else (0,):
        checks = Checks(make, models=models, scratch=scratch, layout=layout, rank=rank, barrier=dist.barrier)
        checks.all(WORLDS[world], sharded=sharded, again=sharded == 1)
        checks.state_moves_to(layout, shard=bool(sharded), other_shard=not sharded)


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_equal_transformers(tmp_path: Path, world: int) -> None:
    save_models(tmp_path / "models")
    (tmp_path / "scratch").mkdir()
    run_world(world, _check, tmp_path / "models", tmp_path / "scratch", world)
