"""What a single process can show of the torch backend: an optimizer elsewhere, files in parts, learning rates."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from streamrl.config import OptimizerConfig
from streamrl.errors import ModelError
from streamrl.trainer.backends.base import Offloaded
from streamrl.trainer.backends.files import TensorFiles, write_tensors
from streamrl.trainer.backends.optimizer import learning_rate
from streamrl.trainer.backends.torch import TorchModel
from tests.trainer.backends.reference import loss_of, make_groups, make_spec, micro_batches
from tests.trainer.models import save_model


def train(model, steps):
    for step in steps:
        groups = make_groups(step)
        micros = micro_batches(groups)
        model.accumulate(micros, loss_of(groups, micros))
        model.update(lambda: None)


def weights(model):
    return {name: weight.clone() for name, weight in model.gather_weights()}


def test_an_optimizer_kept_elsewhere_makes_the_same_steps(tmp_path):
    folder = save_model(tmp_path / "model", "qwen3")
    here, elsewhere = (TorchModel(make_spec(folder, offload_optimizer=kept)) for kept in (False, True))
    for model in (here, elsewhere):
        train(model, range(2))
        # weights from outside reach the optimizer's own copy too
        model.load_weights([(name, weight * 1.01) for name, weight in weights(model).items()])
        train(model, range(2, 4))
    expected = weights(here)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(elsewhere).items())
    for (name, state), (other_name, other) in zip(here.optimizer_state(), elsewhere.optimizer_state(), strict=True):
        assert name == other_name
        assert torch.equal(state, other)


def test_a_padding_token_in_a_prompt_has_a_gradient(tmp_path):
    shape = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    pad = int(make_groups(0)[0].packed_input_ids[0])
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, pad_token_id=pad)).save_pretrained(tmp_path)
    model = TorchModel(make_spec(tmp_path))
    before = weights(model)["model.embed_tokens.weight"][pad]
    train(model, range(1))
    assert not torch.equal(weights(model)["model.embed_tokens.weight"][pad], before)


def test_large_models_are_written_in_parts_that_transformers_reads(tmp_path):
    source = save_model(tmp_path / "source", "qwen3")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    write_tensors(folder, "model", model.named_parameters(), limit=8_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert not (folder / "model.safetensors").exists()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    expected = dict(model.named_parameters())
    assert index["weight_map"].keys() == expected.keys()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.named_parameters())
    files = TensorFiles(folder, "model")
    assert set(files.names()) == expected.keys()
    with pytest.raises(ModelError, match="no tensor nothing"):
        files.read("nothing")
    with pytest.raises(ModelError, match=r"has no optimizer\.safetensors"):
        TensorFiles(folder, "optimizer")


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 5), st.integers(1, 30), st.floats(0.01, 1))
def test_learning_rates_are_those_of_torchs_schedulers(schedule, warmup, total, ratio):
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    rest = max(1, total - warmup)
    main = {
        "constant": lambda: LinearLR(optimizer, start_factor=1.0, total_iters=rest),
        "linear": lambda: LinearLR(optimizer, start_factor=1.0, end_factor=ratio, total_iters=rest),
        "cosine": lambda: CosineAnnealingLR(optimizer, rest, eta_min=2.0 * ratio),
    }[schedule]()
    scheduler = main
    if warmup:
        rising = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        scheduler = SequentialLR(optimizer, [rising, main], milestones=[warmup])
    for step in range(max(total, warmup)):
        found = learning_rate(step, peak=2.0, config=config, total_steps=total)
        assert found == pytest.approx(scheduler.get_last_lr()[0], rel=1e-6), step
        optimizer.step()
        scheduler.step()
    assert learning_rate(10_000, peak=2.0, config=config, total_steps=total) == pytest.approx(
        2.0 if schedule == "constant" else 2.0 * ratio
    )


def test_offloaded_memory_is_free_and_views_come_back():
    whole = torch.arange(6.0)
    view = whole[2:4]
    other = torch.arange(3.0)
    offloaded = Offloaded([whole, view, other])
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    offloaded.bring_back()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    view += 10
    assert whole.tolist() == [0, 1, 12, 13, 4, 5]
    assert other.tolist() == [0, 1, 2]
