"""The Megatron backend over gloo computes what transformers does: all layouts of up to four ranks, and one of eight."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.trainer.layout import Layout
from tests.trainer.backends.common import Checks
from tests.trainer.backends.reference import EXPERTS, KINDS, SCALAR
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world

pytest.importorskip("megatron.core")

TP, PP, DP = Layout(tensor=2), Layout(pipeline=2), Layout(data=2)
TP_PP, TP_DP, PP_DP = Layout(tensor=2, pipeline=2), Layout(tensor=2, data=2), Layout(pipeline=2, data=2)
TP_PP_DP = Layout(tensor=2, pipeline=2, data=2)
ALL = [*KINDS, SCALAR]
WORLDS = {
    1: {Layout(): [*ALL, EXPERTS]},
    2: {TP: ALL, PP: ["llama_tied", "qwen2", SCALAR], DP: ["llama_tied"]},
    4: {TP_PP: ["odd", "qwen3"], TP_DP: [SCALAR], PP_DP: ["llama_tied"]},
    8: {TP_PP_DP: ["qwen2"]},
}
"""Layouts and the models that each is checked with, by world size."""
HEAD_CHUNK = 16
"""Small, so that several chunks make up the head's work."""


def _check_layouts(rank: int, models: Path, scratch: Path, world: int) -> None:
    import torch.distributed as dist

    from streamrl.trainer.backends import distribution
    from streamrl.trainer.backends.megatron.model import MegatronModel

    def make(spec, layout):
        return MegatronModel(spec, layout=layout, rank=rank, timeout_seconds=TIMEOUT_SECONDS)

    distribution.HEAD_CHUNK_STATES = HEAD_CHUNK
    layouts = list(WORLDS[world])
    for number, layout in enumerate(layouts):
        checks = Checks(make, models=models, scratch=scratch, layout=layout, rank=rank, barrier=dist.barrier)
        checks.all(WORLDS[world][layout], sharded=number % 2)
        other = layouts[(number + 1) % len(layouts)]
        checks.state_moves_to(other, shard=bool(number % 2), other_shard=not number % 2)


@pytest.mark.parametrize("world", WORLDS)
def test_layouts_equal_transformers(tmp_path: Path, models: Path, world: int) -> None:
    run_world(world, _check_layouts, models, tmp_path, world)
