"""Shapes of published models, and of a folder."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from streamrl.architecture import Architecture
from streamrl.config import LoraConfig
from streamrl.errors import ModelError
from streamrl.lora import adapter_specs
from streamrl.planner.shapes import KNOWN, shape_of
from streamrl.records.metrics import Final, write_final
from streamrl.trainer.backends.torch import on_meta

PUBLISHED = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
}
"""Weights that the models' files have, a tied head once."""
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16)),
    "llama_bias": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True)),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, **EXPERTS)),
    "some_sparse": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, **EXPERTS, mlp_only_layers=[1])),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_shape_has_as_many_weights_as_was_published(name: str) -> None:
    assert KNOWN[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_has_as_many_weights_as_transformers_makes(tmp_path: Path, kind: str) -> None:
    make, settings = MODELS[kind]
    settings.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = make(settings)
    shape = shape_of(str(tmp_path))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(weight.numel() for weight in layer.parameters()) for layer in model.model.layers]
    assert [shape.layers_between(layer, layer + 1) for layer in range(3)] == layers
    assert shape.largest_layer == max(layers)
    if shape.moe is not None:
        unused = len(shape.moe.layers) * 4 * 3 * 32 * 24  # experts that a token does not meet, with three matrices each
        assert shape.active_parameters == shape.parameters - unused - 50 * 32


@pytest.mark.parametrize("kind", MODELS)
def test_adapters_have_as_many_numbers_as_those_that_are_trained(tmp_path: Path, kind: str) -> None:
    _, settings = MODELS[kind]
    settings.save_pretrained(tmp_path)
    lora = LoraConfig(rank=5)
    weights = [(name, tuple(weight.shape)) for name, weight in on_meta(tmp_path, head="tokens").named_parameters()]
    trained = sum(math.prod(size) for _, size in adapter_specs(weights, lora))
    assert shape_of(str(tmp_path)).adapter(5) == trained


def test_a_run_has_the_shape_that_its_model_workers_have_reported(tmp_path: Path) -> None:
    model = msgspec.convert(msgspec.structs.asdict(KNOWN["Qwen3-30B-A3B"]), Architecture)
    write_final(tmp_path, Final(status={"model": msgspec.to_builtins(model)}))
    assert msgspec.structs.replace(shape_of(str(tmp_path)), name="") == msgspec.structs.replace(
        KNOWN["Qwen3-30B-A3B"], name=""
    )
    write_final(tmp_path, Final())
    with pytest.raises(ModelError, match="has no configuration of the model; give the model's folder instead"):
        shape_of(str(tmp_path))
