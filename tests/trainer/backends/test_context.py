"""Context parallelism: ranks that share rows compute what one rank does, in both backends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.trainer.backends.context import ContextGroup, heads_can_be_shared
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.layout import Layout
from streamrl.trainer.packing import attention_mask
from tests.trainer.backends.common import Checks
from tests.trainer.backends.reference import EXPERTS, SCALAR, THREE_HEADS, make_groups, micro_batches, save_models
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world

TORCH = {
    2: {Layout(context=2): ["qwen3", EXPERTS, SCALAR, THREE_HEADS]},
    # with four ranks two have the same key head
    4: {Layout(data=2, context=2): ["llama_tied"], Layout(context=4): ["odd", THREE_HEADS]},
}
MEGATRON = {
    2: {Layout(context=2): ["qwen3", SCALAR, THREE_HEADS]},
    4: {
        Layout(data=2, context=2): ["llama_tied"],
        Layout(context=2, tensor=2): ["qwen2"],
        Layout(context=2, pipeline=2): ["qwen3"],
    },
}
"""Layouts and the models that each is checked with, by world size."""


def _check(rank: int, models: Path, scratch: Path, world: int, backend: str) -> None:
    import torch.distributed as dist

    def make(spec, layout):
        if backend == "torch":
            return TorchModel(spec, world=layout.world, context=layout.context)
        from streamrl.trainer.backends.megatron.model import MegatronModel

        return MegatronModel(spec, layout=layout, rank=rank, timeout_seconds=TIMEOUT_SECONDS)

    for number, (layout, kinds) in enumerate((TORCH if backend == "torch" else MEGATRON)[world].items()):
        checks = Checks(make, models=models, scratch=scratch, layout=layout, rank=rank, barrier=dist.barrier)
        checks.shared_rows(kinds, shard=number % 2 == 0)
        if THREE_HEADS in kinds:
            checks.long_rows_make_nothing_large(THREE_HEADS)
        if backend == "megatron" and world == 2:  # torch's weights are spread over ranks, whatever these share
            checks.state_moves_to(Layout(data=world), shard=True, other_shard=False)


@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_rows_equal_transformers(tmp_path: Path, world: int, backend: str) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    save_models(tmp_path / "models")
    (tmp_path / "scratch").mkdir()
    run_world(world, _check, tmp_path / "models", tmp_path / "scratch", world, backend)


class Of(ContextGroup):
    """A rank of a context group that exchanges nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.size = size
        self._rank = rank


@given(st.integers(1, 5), st.integers(0, 3))
def test_shares_hold_each_token_and_each_prediction_once(size, seed):
    for micro in micro_batches(make_groups(seed)):
        shares = [Of(rank, size).share(micro) for rank in range(size)]
        length = micro.input_ids.shape[1]
        for name in ("input_ids", "position_ids"):
            columns = np.stack([getattr(share.micro, name) for share in shares], axis=2)
            columns = columns.reshape(len(micro.input_ids), -1)
            assert (columns[:, :length] == getattr(micro, name)).all()
            assert not columns[:, length:].any()
        sees = attention_mask(micro.visible_until)[:, 0]
        for rank, share in enumerate(shares):
            wanted = sees[:, rank::size, rank::size]
            found = attention_mask(share.micro.visible_until)[:, 0]
            assert (found[:, : wanted.shape[1], : wanted.shape[1]] == wanted).all()
        for name in ("target_ids", "row_index", "column_index"):
            together = np.full(size * shares[0].most, -1)
            for rank, share in enumerate(shares):
                found = getattr(share.micro, name) * (size if name == "column_index" else 1)
                begin = rank * share.most
                together[begin : begin + len(found)] = found + (rank if name == "column_index" else 0)
            assert all((together[share.places] == getattr(micro, name)).all() for share in shares)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_ranks_share_heads_where_each_has_as_many_of_one_key_head(kv_heads, queries, context):
    heads = kv_heads * queries
    of_a_key = torch.arange(heads) // queries
    fits = heads % context == 0 and all(
        len(of_a_key.view(context, -1)[rank].unique(return_counts=True)[1].unique()) == 1 for rank in range(context)
    )
    if heads_can_be_shared(heads=heads, kv_heads=kv_heads, context=context):
        assert fits
