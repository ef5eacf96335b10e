"""Megatron's backend on a GPU, in a world over NCCL, computes what the torch backend computes on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.trainer.backends.base import ParallelModel
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.layout import Layout
from streamrl.transport.collective import join_world, open_store
from tests.devices import DEVICE, ON_DEVICE
from tests.forked import Forked
from tests.trainer.backends.reference import EXPERTS, SCALAR, make_spec, save_models
from tests.trainer.backends.test_on_cuda import BATCHES, BFLOAT16_MEAN, loss, same

pytest.importorskip("megatron.core")
pytestmark = [*ON_DEVICE, pytest.mark.timeout(180)]

DEADLINE = 60.0


def _of_both(models: Path, kind: str, answers: Any) -> None:
    """Outputs and two updates of one model on the CPU and on the device, and what is near in bfloat16."""
    from streamrl.trainer.backends.megatron.model import MegatronModel

    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    store = open_store("127.0.0.1")
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    join_world(
        address="127.0.0.1", port=store.port, rank=0, world_size=1, backend=backend, timeout=DEADLINE, store=store
    )
    head: dict[str, Any] = {"head": "scalar"} if kind == SCALAR else {}

    def megatron(**changes: Any) -> MegatronModel:
        spec = make_spec(models / kind, device=DEVICE, **head, **changes)
        return MegatronModel(spec, layout=Layout(), rank=0, timeout_seconds=DEADLINE)

    here, there = TorchModel(make_spec(models / kind, **head)), megatron(shard=True, gradient_checkpointing=True)
    for batch in BATCHES.values():
        for expected, found in zip(here.infer(batch), _outputs(there, batch), strict=True):
            assert found.values.device.type == DEVICE.type
            assert same(found.values, expected.values)
            assert same(found.entropy, expected.entropy)
        norms = []
        for model in (here, there):
            model.accumulate(batch, loss)
            norms.append(model.update(lambda: None).grad_norm)
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)
        there.offload()
        there.onload()
    for (name, expected), (other, found) in zip(here.gather_weights(), there.gather_weights(), strict=True):
        assert name == other
        assert same(found, expected), name
    there.close()
    fresh, low = TorchModel(make_spec(models / kind, **head)), megatron(dtype=torch.bfloat16)
    differences = [
        (found.values.float().cpu() - expected.values).abs()
        for batch in BATCHES.values()
        for expected, found in zip(fresh.infer(batch), _outputs(low, batch), strict=True)
    ]
    assert float(torch.cat(differences).mean()) < BFLOAT16_MEAN
    low.accumulate(BATCHES["long"], loss)
    assert low.update(lambda: None).grad_norm > 0
    low.close()
    torch.distributed.destroy_process_group()


def _outputs(model: ParallelModel, batch: Any) -> Any:
    outputs = model.infer(batch)
    assert outputs is not None
    return outputs


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", SCALAR, EXPERTS])
def test_outputs_gradients_and_steps(tmp_path: Path, kind: str) -> None:
    save_models(tmp_path)
    with Forked(_of_both, [(tmp_path, kind)]) as one:
        one.end(seconds=120.0)
