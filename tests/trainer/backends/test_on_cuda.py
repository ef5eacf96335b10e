"""The torch backend on a GPU computes what it computes on the CPU, in float32; in bfloat16 it is near."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamrl.trainer.backends.base import ModelOutput
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.packing import MicroBatch, pack
from streamrl.types import TrajectoryGroup
from tests.devices import DEVICE, ON_DEVICE
from tests.trainer.backends.reference import KINDS, make_groups, make_spec
from tests.trainer.models import branching_group, random_group

pytestmark = ON_DEVICE

TOLERANCE = 5e-4
BFLOAT16_MEAN = 0.05


def long_groups() -> list[TrajectoryGroup]:
    """Rows with branches that are too long for a dense mask."""
    generator = np.random.default_rng(5)
    return [random_group(0, generator, siblings=4, prompt=300, longest=60), branching_group(1, generator)]


BATCHES: dict[str, list[MicroBatch]] = {
    "short": pack(make_groups(0), max_tokens=60, share_prefix=True),
    "long": pack(long_groups(), max_tokens=2000, share_prefix=True),
    "concatenated": pack(make_groups(0, count=12), max_tokens=4096, share_prefix=True),
    "apart": pack(make_groups(1), max_tokens=60, share_prefix=False),
}


def loss(number: int, output: ModelOutput) -> Tensor:
    weights = torch.linspace(-1, 1, len(output.values), device=output.values.device)
    return (output.values * weights).sum() / (number + 1) + 0.3 * output.entropy.sum()


def both(folder: Path, **changes: Any) -> tuple[TorchModel, TorchModel]:
    """The same model on the CPU and on the device."""
    torch.manual_seed(0)
    KINDS["qwen3"]().save_pretrained(folder)
    return TorchModel(make_spec(folder)), TorchModel(make_spec(folder, device=DEVICE, **changes))


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.float().cpu(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("batch", BATCHES)
def test_outputs_gradients_and_steps(tmp_path: Path, batch: str) -> None:
    here, there = both(tmp_path, gradient_checkpointing=batch == "apart", compiled=batch != "short")
    for _ in range(2):
        for expected, found in zip(here.infer(BATCHES[batch]), there.infer(BATCHES[batch]), strict=True):
            assert found.values.device.type == DEVICE.type
            assert same(found.values, expected.values)
            assert same(found.entropy, expected.entropy)
        norms = []
        for model in (here, there):
            model.accumulate(BATCHES[batch], loss)
            norms.append(model.update(lambda: None).grad_norm)
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    for (name, expected), (other, found) in zip(here.gather_weights(), there.gather_weights(), strict=True):
        assert name == other
        assert same(found, expected), name


def test_bfloat16_is_near(tmp_path: Path) -> None:
    here, there = both(tmp_path, dtype=torch.bfloat16)
    differences = [
        (found.values.float().cpu() - expected.values).abs()
        for batch in BATCHES.values()
        for expected, found in zip(here.infer(batch), there.infer(batch), strict=True)
    ]
    assert float(torch.cat(differences).mean()) < BFLOAT16_MEAN


@pytest.mark.parametrize("on_cpu", [False, True])
def test_an_optimizer_on_either_device_makes_the_same_step(tmp_path: Path, on_cpu: bool) -> None:
    here, there = both(tmp_path, offload_optimizer=on_cpu)
    for model in (here, there):
        model.accumulate(BATCHES["short"], loss)
        model.update(lambda: None)
    parts = zip(here.optimizer_parts(), there.optimizer_parts(), strict=True)
    for expected, found in parts:
        assert expected.name == found.name
        assert same(found.values, expected.values), expected.name


def test_what_was_offloaded_comes_back_bit_for_bit(tmp_path: Path) -> None:
    _, model = both(tmp_path)
    model.accumulate(BATCHES["short"], loss)
    model.update(lambda: None)
    before = {name: weight.clone() for name, weight in model.gather_weights()}
    taken = torch.cuda.memory_allocated(DEVICE) if DEVICE.type == "cuda" else 0
    model.offload()
    if DEVICE.type == "cuda":
        assert torch.cuda.memory_allocated(DEVICE) < taken
    model.onload()
    assert all(torch.equal(weight, before[name]) for name, weight in model.gather_weights())
    assert all(torch.isfinite(output.values).all() for output in model.infer(BATCHES["short"]))
