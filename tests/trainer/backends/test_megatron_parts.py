"""The Megatron backend's parts that need no process group but their own: names, shapes, memory."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.errors import ModelError
from streamrl.trainer.layout import Layout
from tests.experts import as_in_files
from tests.trainer.backends.reference import EXPERTS, KINDS

pytest.importorskip("megatron.core")

from streamrl.trainer.backends.megatron.shape import read_shape
from streamrl.trainer.backends.megatron.weights import (
    Columns,
    QueryGroups,
    ReplicatedWeight,
    StackedWeight,
    Vocabulary,
    Weight,
    stage_weights,
    whole_shapes,
)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def check_round_trip(cut, wholes: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    sources = tuple((str(number), tuple(whole.shape)) for number, whole in enumerate(wholes))
    weight = Weight("parameter", sources, cut)
    shards = [weight.split(wholes, rank, size) for rank in range(size)]
    assert {shard.shape for shard in shards} == {weight.shard_shape(size)}
    found = dict(weight.join(shards))
    assert all(torch.equal(found[str(number)], whole) for number, whole in enumerate(wholes))
    check_parts(weight, wholes, shards)
    return shards


def check_parts(weight: Weight, wholes: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
    """Shards that are shared out anywhere, as a distributed optimizer does, are parts of the whole tensors."""
    total = 0
    for rank, shard in enumerate(shards):
        flat = shard.flatten()
        seen = torch.zeros_like(flat)
        border = len(flat) // 3
        for first, mine in ((0, flat[:border]), (border, flat[border:])):
            for part in weight.parts(mine, first, rank=rank, size=len(shards)):
                box = tuple(slice(a, a + n) for a, n in zip(part.start, part.values.shape, strict=True))
                assert torch.equal(part.values, wholes[int(part.name)][box])
                at = part.values.storage_offset()
                seen[at : at + part.values.numel()] += 1
        assert seen.max() <= 1
        assert not flat[seen == 0].any()  # what pads the vocabulary
        total += int(seen.sum())
    copies = len(shards) if weight.cut.parallel_dim is None else 1
    assert total == copies * sum(whole.numel() for whole in wholes)


@given(size=st.integers(1, 4), times=st.integers(1, 3), columns=st.integers(1, 3), rows=st.integers(1, 30))
def test_cuts_can_be_put_together_again(size: int, times: int, columns: int, rows: int) -> None:
    check_round_trip(ReplicatedWeight(), [numbered(rows)], size)
    check_round_trip(Columns(), [numbered(rows, size * times)], size)
    check_round_trip(StackedWeight(), [numbered(size * times, columns), -numbered(size * times, columns)], size)
    shards = check_round_trip(Vocabulary(), [numbered(rows, columns) + 1], size)
    assert int((torch.cat(shards) == 0).all(1).sum()) == -rows % size


@given(
    size=st.integers(1, 3),
    times=st.integers(1, 2),
    queries=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    bias=st.booleans(),
)
def test_query_groups_stay_together(size: int, times: int, queries: int, head_dim: int, bias: bool) -> None:
    groups = size * times
    columns = () if bias else (2,)
    # each row says which head it belongs to: queries 0, 1, ...; keys 1000, ...; values 2000, ...
    wholes = []
    for heads, first in ((groups * queries, 0), (groups, 1000), (groups, 2000)):
        numbers = torch.arange(heads).repeat_interleave(head_dim) + first
        wholes.append(numbers.reshape(-1, *(1 for _ in columns)).expand(-1, *columns).float())
    cut = QueryGroups(groups=groups)
    shards = check_round_trip(cut, wholes, size)
    heads = torch.cat(shards).reshape(groups, queries + 2, head_dim, -1)[:, :, 0, 0].tolist()
    assert heads == [
        [*range(group * queries, (group + 1) * queries), 1000 + group, 2000 + group] for group in range(groups)
    ]


@pytest.mark.parametrize(("kind", "stages"), [*product(KINDS, [1, 2]), (EXPERTS, 1), (EXPERTS, 3)])
def test_stages_hold_the_weights_of_transformers(models: Path, kind: str, stages: int) -> None:
    shape = read_shape(models / kind)
    plan = [stage_weights(shape, "tokens", stage=stage, layout=Layout(pipeline=stages)) for stage in range(stages)]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / kind))
    wanted = {name: tuple(parameter.shape) for name, parameter in as_in_files(dict(theirs.named_parameters())).items()}
    assert list(whole_shapes(plan).items()) == list(wanted.items())
    copies = [weight.sources[0][0] for weights in plan for weight in weights if weight.copy]
    assert copies == (["model.embed_tokens.weight"] if shape.tied and stages == 2 else [])


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(data=2, tensor=2), Layout(data=4, expert=2), Layout(tensor=2, context=2, data=2, expert=4)],
)
def test_each_number_of_a_weight_is_taken_from_one_rank(models: Path, layout: Layout) -> None:
    shape = read_shape(models / EXPERTS)
    for weight in stage_weights(shape, "tokens", stage=0, layout=layout):
        replicas = {rank: weight.replica(layout, rank) for rank in range(layout.world)}
        held = [rank for rank in replicas if weight.is_held(layout, rank)]
        assert len(held) == layout.world // (layout.expert if "experts" in weight.parameter else 1)
        assert {rank for rank, replica in replicas.items() if replica} <= set(held)
        cuts = 1 if weight.cut.parallel_dim is None else layout.tensor
        for cut in range(cuts):
            found = [
                replica
                for rank, replica in replicas.items()
                if replica and layout.coordinates(rank).tensor % cuts == cut
            ]
            copies = len(found)
            assert sorted(found) == [(copies, which) for which in range(copies)], weight.parameter


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "mistral"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_is_not_supported_is_refused(models: Path, tmp_path: Path, change: dict, named: str) -> None:
    settings = json.loads((models / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(ModelError, match=named):
        read_shape(tmp_path)


def test_layouts_that_do_not_fit_are_refused(models: Path) -> None:
    shape = read_shape(models / "llama")
    shape.check(Layout(tensor=2, pipeline=2, data=3))
    refused = [
        (Layout(tensor=4), "num_key_value_heads = 2"),
        (Layout(pipeline=3), "num_hidden_layers = 2"),
        (Layout(data=2, expert=2), "it has no experts"),
    ]
    for layout, named in refused:
        with pytest.raises(ModelError, match=named):
            shape.check(layout)
    shape = read_shape(models / EXPERTS)
    shape.check(Layout(data=2, tensor=2, expert=4))
    for layout, named in (
        (Layout(data=3, expert=3), "num_experts = 4"),
        (Layout(data=3, expert=2), "multiple of expert"),
    ):
        with pytest.raises(ModelError, match=named):
            shape.check(layout)
