"""Adapters on the torch backend, on one and two ranks, whole and sharded, against Hugging Face's peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamrl import lora as adapters
from streamrl.config import LoraConfig
from tests.trainer.backends.reference import (
    ENTROPY,
    LR,
    OPTIMIZER,
    TEMPERATURE,
    loss_of,
    make_groups,
    make_spec,
    micro_batches,
    token_weights,
)
from tests.trainer.backends.world import run_world

LORA = LoraConfig(rank=4, alpha=12.0)
KIND = "qwen2"


def write_adapter(folder: Path, tensors: dict[str, Tensor], *, base: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / adapters.SETTINGS).write_text(json.dumps(adapters.adapter_settings(LORA, str(base))))
    save_file(tensors, folder / f"{adapters.TENSORS}.safetensors", metadata={"format": "pt"})
    return folder


def random_adapter(base: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(name, tuple(weight.shape)) for name, weight in load_file(base / "model.safetensors").items()]
    specs = adapters.adapter_specs(shapes, LORA)
    return {name: torch.randn(shape, generator=generator) / 5 for name, shape in specs}


def with_peft(base: Path, adapter: Path) -> Any:
    """The model as peft's users read it, in float64."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).double()


def predicted(model: Any, group: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of `group`, packed, one sequence at a time."""
    values, entropies = [], []
    for ids in torch.from_numpy(group.packed_input_ids).long().split(group.seqlens.tolist()):
        logits = model(ids[None]).logits[0] / TEMPERATURE
        own = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        values.append(torch.cat([torch.zeros(1), own]))
        entropies.append(torch.cat([torch.zeros(1), torch.distributions.Categorical(logits=logits[:-1]).entropy()]))
    return torch.cat(values), torch.cat(entropies)


def outputs(model: Any, group: Any) -> Tensor:
    """Log-probabilities of `group` from a `ParallelModel`, packed; 0 where nothing is predicted."""
    found = torch.zeros(group.tokens)
    micros = micro_batches([group])
    for micro, output in zip(micros, model.infer(micros), strict=True):
        found[torch.from_numpy(micro.target_index).long()] = output.values
    return found


def peft_steps(base: Path, adapter: Path, count: int) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """The first gradients, then each step's log-probabilities of a group, and the adapter after `count` steps."""
    from streamrl.trainer.backends.optimizer import learning_rate
    from tests.trainer.backends.reference import UPDATES

    model = with_peft(base, adapter)
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    )
    first: dict[str, Tensor] = {}
    seen = []
    for step in range(count):
        optimizer.zero_grad()
        for group in make_groups(step):
            values, entropies = predicted(model, group)
            sampled = torch.from_numpy(group.packed_loss_mask)
            loss = (values * token_weights(group))[sampled].sum() + ENTROPY * entropies[sampled].sum()
            loss.backward()
        first = first or {name: p.grad.clone() for name, p in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), OPTIMIZER.grad_clip)
        optimizer.param_groups[0]["lr"] = learning_rate(step, peak=LR, config=OPTIMIZER, total_steps=UPDATES)
        optimizer.step()
        with torch.no_grad():
            seen.append(predicted(model, make_groups(0)[1])[0])
    return first, seen, {name: p.detach().clone() for name, p in trained.items()}


def _equals_peft(rank: int, models: Path, scratch: Path, world: int, shard: bool) -> None:
    from streamrl.trainer.backends.torch import TorchModel

    base, folder = models / KIND, scratch / "adapter"
    gradients, seen, last = peft_steps(base, folder, 3)
    frozen = load_file(base / "model.safetensors")
    spec = make_spec(base, lora=LORA, adapter=folder, shard=shard, gradient_checkpointing=shard)
    model = TorchModel(spec, world=world)
    compared = make_groups(0)[1]
    sampled = torch.from_numpy(compared.packed_loss_mask)
    for step in range(3):
        own = make_groups(step)[rank::world]
        micros = micro_batches(own)
        if step == 0:
            model.accumulate(micros, loss_of(own, micros))
            largest = max(float(gradient.abs().max()) for gradient in gradients.values())
            got = model._gradients()
            for name, gradient in model._shards.gather(got):
                if rank == 0:
                    torch.testing.assert_close(gradient.double(), gradients[name], rtol=0, atol=3e-6 * largest)
            model._forget_gradients()  # they were summed over the ranks
        model.accumulate(micros, loss_of(own, micros))
        model.update(lambda: None)
        torch.testing.assert_close(outputs(model, compared)[sampled], seen[step][sampled].float(), rtol=0, atol=2e-5)
    for name, weight in model.gather_weights():
        if rank == 0:
            torch.testing.assert_close(weight.double(), last[name], rtol=0, atol=1e-5)
    with model.without_adapter():
        plain = outputs(model, compared)
    untouched = TorchModel(make_spec(base, lr=None), world=1)
    torch.testing.assert_close(plain, outputs(untouched, compared), rtol=0, atol=1e-5)
    for name, weight in model._frozen.gather(model._frozen.local()):  # type: ignore[union-attr]
        if rank == 0:
            assert torch.equal(weight, frozen[name]), name
    whole = dict(model.merged().gather_weights())
    if rank == 0:
        save_file({name: weight.contiguous() for name, weight in whole.items()}, scratch / "model.safetensors")
        (scratch / "config.json").write_text((base / "config.json").read_text())
        merged = TorchModel(make_spec(scratch, lr=None), world=1)
        adapted = dict(merged.gather_weights())
        assert not torch.equal(
            adapted["model.layers.0.mlp.up_proj.weight"], frozen["model.layers.0.mlp.up_proj.weight"]
        )
        assert torch.equal(adapted["model.norm.weight"], frozen["model.norm.weight"])
    mine = outputs(model, compared)
    if rank == 0:
        torch.testing.assert_close(outputs(merged, compared)[sampled], mine[sampled], rtol=0, atol=2e-5)
    model.close()
    rounded = TorchModel(msgspec.structs.replace(spec, dtype=torch.bfloat16), world=world)
    assert rounded._frozen is not None
    assert {weight.dtype for weight in rounded._frozen.local().values()} == {torch.bfloat16}
    assert {weight.dtype for weight in rounded._parameters.values()} == {torch.float32}
    own = make_groups(0)[rank::world]
    micros = micro_batches(own)
    rounded.accumulate(micros, loss_of(own, micros))
    rounded.update(lambda: None)
    torch.testing.assert_close(outputs(rounded, compared)[sampled], seen[0][sampled].float(), rtol=0, atol=0.3)
    assert {weight.dtype for _, weight in rounded.merged().gather_weights(dtype=torch.bfloat16)} == {torch.bfloat16}
    rounded.close()


@pytest.mark.parametrize(("world", "shard"), [(1, False), (2, False), (2, True)])
def test_an_adapter_learns_as_with_peft_and_its_base_stays(
    models: Path, tmp_path: Path, world: int, shard: bool
) -> None:
    pytest.importorskip("peft")
    write_adapter(tmp_path / "adapter", random_adapter(models / KIND), base=models / KIND)
    run_world(world, _equals_peft, models, tmp_path, world, shard)
