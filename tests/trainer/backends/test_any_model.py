"""The torch backend trains models of any family as transformers does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.models import save_family
from streamrl.config import TrainerConfig
from streamrl.export import copy_settings
from streamrl.safetensors_files import bytes_of_parts, write_bytes
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.packing import pack_apart
from streamrl.trainer.roles.items import infer_packed, pack_for
from streamrl.types import TrajectoryGroup
from tests.trainer.backends.reference import Reference, loss_of, make_groups, make_spec
from tests.trainer.models import save_model

TOLERANCE = 1e-4
SETTINGS = TrainerConfig(max_tokens_per_microbatch=60)


def worst_difference(model: TorchModel, reference: Reference, groups: Sequence[TrajectoryGroup]) -> float:
    """Of the log-probabilities of sampled tokens."""
    outputs = infer_packed(model, groups, SETTINGS)
    assert outputs is not None
    worst = 0.0
    for group, found in zip(groups, outputs, strict=True):
        wanted = reference.predicted(group)[0]
        differences = (torch.from_numpy(found) - wanted)[torch.from_numpy(group.packed_loss_mask)]
        worst = max(worst, float(differences.abs().max()))
    return worst


def step(model: TorchModel, groups: Sequence[TrajectoryGroup]) -> float:
    micros = pack_for(model, groups, SETTINGS)
    model.accumulate(micros, loss_of(groups, micros))
    return model.update(lambda: None).grad_norm


@pytest.mark.parametrize(("family", "packs"), [("gpt_oss", True), ("deepseek_v3", True), ("falcon_h1", False)])
def test_families_learn_as_in_transformers_and_are_saved_for_it(family: str, packs: bool, tmp_path: Path) -> None:
    """Sinks and windows; experts in one tensor and buffers in the files; layers that would mix packed rows."""
    folder = save_family(tmp_path / family, family)
    model = TorchModel(make_spec(folder))
    assert model.packs_rows == packs
    reference = Reference(folder)
    assert worst_difference(model, reference, make_groups(7)) < TOLERANCE
    for number in range(2):
        wanted = reference.step(make_groups(number))
        assert step(model, make_groups(number)) == pytest.approx(wanted.norm, rel=1e-3)
    assert worst_difference(model, reference, make_groups(7)) < 10 * TOLERANCE  # steps amplify rounding
    saved = tmp_path / "saved"
    saved.mkdir()
    copy_settings(folder, saved)
    write_bytes(saved / "model.safetensors", bytes_of_parts(model.weight_parts()))
    assert worst_difference(model, Reference(saved), make_groups(7)) < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        {"attention_dropout": 0.1},
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
    ],
)
def test_dropout_is_off_and_windows_are_kept(change: dict[str, object], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen2")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **change}))
    model, reference = TorchModel(make_spec(folder)), Reference(folder)
    reference.model.eval()
    assert model.packs_rows
    assert worst_difference(model, reference, make_groups(7)) < 1e-5
    wanted = reference.step(make_groups(0))
    assert step(model, make_groups(0)) == pytest.approx(wanted.norm, rel=1e-4)


def test_rows_of_single_trajectories_predict_each_sampled_token_once() -> None:
    groups = make_groups(3)
    micros = pack_apart(groups, max_tokens=40)
    predicted = [(int(g), int(t)) for m in micros for g, t in zip(m.group_index, m.target_index, strict=True)]
    assert sorted(predicted) == [
        (g, int(t)) for g, group in enumerate(groups) for t in group.packed_loss_mask.nonzero()[0]
    ]
    for micro in micros:
        assert not micro.branched
        assert micro.tokens <= 40
        for row, column, group, target in zip(
            micro.row_index, micro.column_index, micro.group_index, micro.target_index, strict=True
        ):
            assert micro.input_ids[row, column] == groups[group].packed_input_ids[target - 1]
